"""Every benchmark that a page names starts: its imports are there, and it says what it takes.

The table of shares of the hardware's peak is that of the committed results.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from sampling import drawn

FOLDER = Path(__file__).parents[2] / "benchmarks"
NEEDS = {"flaggems_mm": "flag_gems", "plot_serve": "matplotlib"}
"""Packages that only these import."""
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if "argparse" in path.read_text())


@pytest.mark.parametrize("name", drawn(PROGRAMS, 5, "benchmarks"))
def test_a_benchmark_starts(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: " in done.stdout


def test_the_table_of_shares_is_that_of_the_results() -> None:
    done = subprocess.run([sys.executable, FOLDER / "peak_shares.py"], capture_output=True, text=True, check=True)
    page = FOLDER.parent / "docs/measured/gpu.md"
    assert done.stdout in page.read_text(encoding="utf-8"), "python benchmarks/peak_shares.py prints the table"

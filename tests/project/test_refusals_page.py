"""``docs/evidence/quantization.md`` counts the refused kinds of checkpoints as ``tools/refusals.py`` does."""

from __future__ import annotations

import re
from pathlib import Path

from tool_modules import tool

ROOT = Path(__file__).parents[2]
refusals = tool("refusals")


def test_the_counts_of_today_are_those_of_the_command() -> None:
    """Today's sources answer for both columns, because old ones need the repository's history."""
    today = refusals.at(ROOT / "src", refusals.kinds())
    page = (ROOT / "docs/evidence/quantization.md").read_text(encoding="utf-8")
    counts = re.compile(r"^\| (\w+) \| (\w+) \| \d+ (of \d+) \| (\d+ of \d+) \|$", re.MULTILINE)
    assert counts.findall(page) == counts.findall("\n".join(refusals.table(today, today)))

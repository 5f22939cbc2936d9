"""The guides in ``docs/guide`` are few and short; details have a page in ``docs/evidence`` or ``docs/measured``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = sorted((Path(__file__).parents[2] / "docs/guide").glob("*.md"))


def test_there_are_ten_guides_at_most() -> None:
    assert 0 < len(GUIDES) <= 10, [page.name for page in GUIDES]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_is_read_in_five_minutes(page: Path) -> None:
    without_code = re.sub(r"(?ms)^\s*```.*?^\s*```", "", page.read_text(encoding="utf-8"))
    prose = " ".join(line for line in without_code.splitlines() if not line.startswith("|"))
    assert len(re.sub(r"\]\([^)]*\)", "]", prose).split()) <= 1300

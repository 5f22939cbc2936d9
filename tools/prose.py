"""Checks the prose of Markdown pages: one sentence a line, short lines, short cells, subject first.

    python tools/prose.py            # README.md, CONTRIBUTING.md, CHANGELOG.md and docs/*.md
    python tools/prose.py FILE ...

Code blocks are not prose, and headings are titles: neither is checked. Link targets do not count as length.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = 160
NOT_YET = frozenset({"docs/contract.md"})
"""Pages that are left out until they are rewritten."""

HIDDEN_SUBJECT = re.compile(r"(Of|What|Where|How many)\b")
MARKER = re.compile(r"\s*(?:\[\^[\w-]+\]:\s*|\[[\w-]+\]:\s*|>\s*|[-*+]\s+|\d+\.\s+)*")
BLOCK = re.compile(r"\s*(?:[-*+]\s|\d+\.\s|#|\||>|\[\^[\w-]+\]:|!\[|<)")
"""How a line begins that continues no paragraph."""

CODE = re.compile(r"`+[^`]*`+")
TARGET = re.compile(r"\]\([^)]*\)|\]\[[^\]]*\]")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|al)\.")
NEXT_SENTENCE = re.compile(r"""[.!?][)"'*_”\]]*\s+["'(*_“\[]*(?=[A-Z]|vLLM\b)""")
END = re.compile(r"""[.!?:][)"'*_”\]]*$""")


def visible(line: str) -> str:
    """The line as a reader sees it, with code spans as single words."""
    without_code = CODE.sub(lambda code: "C" + "o" * (len(code[0]) - 3), line)
    return ABBREVIATION.sub(r"\1", TARGET.sub("]", without_code)).replace("[^", "[")


def problems(text: str) -> Iterator[tuple[int, str]]:
    """Each ``(line number, what is wrong)`` of a page."""
    lines = text.splitlines()
    prose = list(_prose(lines))
    for number in prose:
        line = visible(lines[number])
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]:
                yield from ((number + 1, problem) for problem in _cell(cell.strip()))
            continue
        sentence = line[MARKER.match(line).end() :]  # type: ignore[union-attr]
        if len(line) > LONGEST:
            yield number + 1, f"{len(line)} characters, at most {LONGEST}"
        if NEXT_SENTENCE.search(sentence):
            yield number + 1, "more than one sentence on a line"
        yield from ((number + 1, problem) for problem in _beginning(sentence))
        continued = number + 1 in prose and not BLOCK.match(lines[number + 1])
        if continued and not END.search(line):
            yield number + 1, "the line ends inside a sentence"


def _prose(lines: list[str]) -> Iterator[int]:
    """Indices of the lines that are neither code, headings, nor empty."""
    fence = ""
    for number, line in enumerate(lines):
        opened = re.match(r"\s*(```+|~~~+)", line)
        if fence:
            fence = "" if opened and opened[1].startswith(fence) else fence
        elif opened:
            fence = opened[1]
        elif line.strip() and not line.startswith("#"):
            yield number


def _cell(cell: str) -> Iterator[str]:
    if len(cell) > LONGEST:
        yield f"a cell of {len(cell)} characters, at most {LONGEST}; a paragraph goes under the table"
    yield from _beginning(cell)


def _beginning(text: str) -> Iterator[str]:
    if found := HIDDEN_SUBJECT.match(text.lstrip("*_\"'(")):
        yield f"begins with '{found[0]}'; begin with the subject"


def pages() -> list[Path]:
    """The pages of this project but for those that are not yet rewritten."""
    listed = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    listed += sorted((ROOT / "docs").glob("*.md"))
    return [page for page in listed if page.relative_to(ROOT).as_posix() not in NOT_YET]


def main(arguments: list[str]) -> int:
    """Print what is wrong; the exit code is 1 if anything is."""
    found = 0
    for page in [Path(argument) for argument in arguments] or pages():
        for number, problem in problems(page.read_text(encoding="utf-8")):
            name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
            print(f"{name}:{number}: {problem}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

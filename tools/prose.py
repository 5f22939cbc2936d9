"""Checks the prose of Markdown pages, docstrings and comments.

    python tools/prose.py            # the pages, and the Python files of src, tests, tools and benchmarks
    python tools/prose.py FILE ...

A page has one sentence a line, short lines and short cells, and a sentence begins with its subject. Code blocks are
not prose, and headings are titles: neither is checked. Link targets do not count as length. In Python files only the
beginnings of sentences are checked, because ruff checks the lines.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = 160
SOURCES = ("src", "tests", "tools", "benchmarks")

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


def problems_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Each ``(line number, what is wrong)`` of a Python file's docstrings and comments."""
    for number, text in sorted([*_docstrings(source), *_comments(source)]):
        for sentence in SENTENCE.split(_LITERAL.sub("", text)):
            yield from ((number, problem) for problem in _beginning(sentence.strip()))


SENTENCE = re.compile(r"""(?<=[.!?:])["')]*\s+(?=[A-Z])|\n\s*\n""")
_LITERAL = re.compile(r"(?m)^(\s*>>> .*|    .*::.*)$")


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Strings that stand as statements: docstrings, also those below a field or a constant."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments, each with those that continue it on the next lines."""
    began, last, text = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith("#!"):
            continue
        words = token.string.lstrip("#:").strip()
        if token.start[0] == last + 1 and token.line.lstrip().startswith("#"):
            text += f" {words}"
        else:
            if text:
                yield began, text
            began, text = token.start[0], words
        last = token.start[0]
    if text:
        yield began, text


def pages() -> list[Path]:
    """The Markdown pages of this project."""
    listed = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
    return listed + sorted((ROOT / "docs").rglob("*.md"))


def sources() -> list[Path]:
    """The Python files of this project."""
    return sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))


def main(arguments: list[str]) -> int:
    """Print what is wrong; the exit code is 1 if anything is."""
    found = 0
    for path in [Path(argument) for argument in arguments] or pages() + sources():
        check = problems_of_code if path.suffix == ".py" else problems
        for number, problem in check(path.read_text(encoding="utf-8")):
            name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            print(f"{name}:{number}: {problem}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Check the prose of Markdown pages, docstrings, comments and messages.

    python tools/prose.py            # the pages, the fragments of the changelog, and the Python files of src
    python tools/prose.py FILE ...

A page has one sentence a line, short lines and short cells. Every sentence keeps the rules in `WORDS` and `CLAUSES`; a
docstring also keeps those in `SUBJECTS`. Code is not prose, and link targets do not count as length.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LONGEST = 160
"""Characters of a line of a page, or of a table's cell."""


class Rule(NamedTuple):
    """A pattern, and what to write instead of what it finds."""

    pattern: re.Pattern[str]
    instead: str


def _words(words: str) -> re.Pattern[str]:
    return re.compile(rf"\b({words})\b", re.IGNORECASE)


WORDS = (
    Rule(_words("nobody|no one"), "name the caller, backend or host that does not"),
    Rule(_words("somebody|someone"), "name the caller, backend, host or reader"),
    Rule(_words("so many"), "give the count, or its name"),
    Rule(_words("told"), "write 'logged', 'given', 'passed' or 'set'"),
    Rule(_words("whose"), "write 'with', or start a sentence of its own"),
    Rule(_words("likewise"), "say the thing, or leave the word out"),
    Rule(_words("of ours"), "write 'our', or name the package"),
)
"""Rules of every sentence."""

CLAUSES = Rule(_words("that|which|who|whom|what"), "split the sentence")
"""Words that open a relative clause; `MOST_CLAUSES` a sentence."""

MOST_CLAUSES = 2
"""Relative clauses that a reader follows in one sentence."""

SUBJECTS = (
    Rule(
        re.compile(r"(Of|As (for|many)|He|It|She|That (of|which|is)|The (one|ones|same)|These|They|This is|Those)\b"),
        "begin with an imperative or with the field's noun",
    ),
    Rule(
        re.compile(
            r"(Adds|Checks|Ends|Finds|Gets|Gives|Has|Imports|Makes|Raises|Returns|Says|Sets|Starts|Tells)\b(?! of)"
        ),
        "write the imperative: 'Return', not 'Returns'",
    ),
    Rule(re.compile(r"(Are|Do|Does|Is|Was)\b"), "begin with 'Whether', or with what the module does"),
)
"""Rules of a docstring's first words. Ruff's D401 is none of them, because it takes a noun phrase for an error."""

CODE = re.compile(r"`+[^`]*`+")
TARGET = re.compile(r"\]\([^)]*\)|\]\[[^\]]*\]")
MARKER = re.compile(r"\s*(?:\[\^[\w-]+\]:\s*|\[[\w-]+\]:\s*|>\s*|[-*+]\s+|\d+\.\s+)*")
"""What a line of a page begins with before its sentence."""

BLOCK = re.compile(r"\s*(?:[-*+]\s|\d+\.\s|#|\||>|\[\^[\w-]+\]:|!\[|<)")
"""How a line begins that continues no paragraph."""

ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|al)\.")
NEXT_SENTENCE = re.compile(r"""[.!?][)"'*_”\]]*\s+["'(*_“\[]*(?=[A-Z]|vLLM\b)""")
END = re.compile(r"""[.!?:][)"'*_”\]]*$""")

SENTENCE = re.compile(r"""(?<=[.!?:])["')]*\s+(?=[A-Z`"'(*])|\n\s*\n|\n\s*(?=[-*] |\w+: )""")
"""What stands between two sentences of a docstring: a full stop, an empty line, or the next item of a list."""

EXAMPLE = re.compile(r"(?m)^(\s*>>> .*|    .*::.*)$")
FEWEST_WORDS = 4
"""Words of a string that is a message rather than a name."""


def sentence_problems(sentence: str) -> Iterator[tuple[int, str]]:
    """Each ``(line of the sentence, what is wrong)`` wherever it stands."""
    words = CODE.sub(lambda code: "`" + "\n" * code[0].count("\n"), sentence)
    for pattern, instead in WORDS:
        for found in pattern.finditer(words):
            yield words.count("\n", 0, found.start()), f"'{' '.join(found[0].lower().split())}': {instead}"
    clauses = len(CLAUSES.pattern.findall(words))
    if clauses > MOST_CLAUSES:
        first = len(words) - len(words.lstrip())
        found_in = f"{clauses} of that, which, who, what in a sentence, at most {MOST_CLAUSES}"
        yield words.count("\n", 0, first), f"{found_in}: {CLAUSES.instead}"


def docstring_problems(text: str) -> Iterator[tuple[int, str]]:
    """Each ``(line of the docstring, what is wrong)``, with its first words and every sentence."""
    for pattern, instead in SUBJECTS:
        if found := pattern.match(text.lstrip()):
            yield 0, f"begins with '{found[0].strip()}': {instead}"
    yield from text_problems(text)


def text_problems(text: str) -> Iterator[tuple[int, str]]:
    """Each ``(line of the text, what is wrong)`` in one of its sentences."""
    prose = ABBREVIATION.sub(r"\1", EXAMPLE.sub("", text))
    start = 0
    for end in [*(found.start() for found in SENTENCE.finditer(prose)), len(prose)]:
        lines = prose.count("\n", 0, start)
        yield from ((lines + line, problem) for line, problem in sentence_problems(prose[start:end]))
        start = end


def page_problems(text: str) -> Iterator[tuple[int, str]]:
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
        yield from ((number + 1, problem) for _, problem in sentence_problems(sentence))
        continued = number + 1 in prose and not BLOCK.match(lines[number + 1])
        if continued and not END.search(line):
            yield number + 1, "the line ends inside a sentence"


def visible(line: str) -> str:
    """The line as a reader sees it, with code spans as single words."""
    without_code = CODE.sub(lambda code: "C" + "o" * (len(code[0]) - 3), line)
    return ABBREVIATION.sub(r"\1", TARGET.sub("]", without_code)).replace("[^", "[")


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
    yield from (problem for _, problem in text_problems(cell))


def fragment_problems(text: str) -> Iterator[tuple[int, str]]:
    """Each ``(line number, what is wrong)`` of a fragment of the changelog, which may be one long line."""
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, problem) for _, problem in text_problems(line))


def code_problems(source: str) -> Iterator[tuple[int, str]]:
    """Each ``(line number, what is wrong)`` of a Python file's docstrings, comments and messages."""
    tree = ast.parse(source)
    docstrings = dict(_docstrings(tree))
    found = [
        (node.lineno + at, problem) for node, text in docstrings.items() for at, problem in docstring_problems(text)
    ]
    found += [(number + at, problem) for number, text in _comments(source) for at, problem in text_problems(text)]
    # A message may be written as strings on several lines, of which only the first is known.
    found += [(number, problem) for number, text in _messages(tree, docstrings) for _, problem in text_problems(text)]
    found += [(number, "one docstring for several constants: give each its own") for number in _shared(tree)]
    yield from sorted(found)


def _docstrings(tree: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    """Strings that stand as statements: docstrings, also those below a field or a constant."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)) as string):
                yield string, text


def _messages(tree: ast.AST, docstrings: dict[ast.Constant, str]) -> Iterator[tuple[int, str]]:
    """Strings of several words, such as errors, reasons, logs and helps; a value in one reads as a word."""
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=values):
                text = "".join(value.value if isinstance(value, ast.Constant) else "`x`" for value in values)
            case ast.Constant(value=str(text)) if node not in docstrings and node not in parts:
                pass
            case _:
                continue
        if len(text.split()) >= FEWEST_WORDS:
            yield node.lineno, text


def _shared(tree: ast.AST) -> Iterator[int]:
    """Lines of docstrings below an assignment to several names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in pairwise(node.body):
                match before, after:
                    case ast.Assign(targets=[ast.Tuple()]), ast.Expr(value=ast.Constant(value=str())):
                        yield after.lineno


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments, each with those that continue it on the next lines."""
    began, last, text = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith("#!"):
            continue
        words = token.string.lstrip("#:").strip()
        if token.start[0] == last + 1 and token.line.lstrip().startswith("#"):
            text += f"\n{words}"
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


def fragments() -> list[Path]:
    """The fragments of the changelog."""
    return sorted((ROOT / "changes").glob("*.md"))


def sources() -> list[Path]:
    """The Python files of the packages."""
    return sorted((ROOT / "src").rglob("*.py"))


def file_problems(path: Path) -> list[tuple[int, str]]:
    """Each ``(line number, what is wrong)`` of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return list(code_problems(text))
    return list(fragment_problems(text) if path.resolve().parent == ROOT / "changes" else page_problems(text))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def main(arguments: list[str]) -> int:
    """Print what is wrong; the exit code is 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    found = {path: file_problems(path) for path in options.files or pages() + fragments() + sources()}
    for path, listed in found.items():
        for number, problem in listed:
            print(f"{_name(path)}:{number}: {problem}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

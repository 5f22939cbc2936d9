"""English prose that ships with Python: what the small model is trained on, and what is held out to measure it.

A document is a module of the standard library (its docstrings and comments), a topic of ``pydoc_data.topics``, or a
text file of IDLE's; its paragraphs are one line each, so that a model learns sentences and not the width of a page.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "encodings", "ensurepip", "pydoc_data"}
"""Folders without prose of Python's own, or with the topics, which are read as data."""
TEXTS = ("idlelib/NEWS.txt", "idlelib/README.txt", "idlelib/TODO.txt", "LICENSE.txt")

WORD = re.compile(r"[(\"']*[A-Za-z][a-z'-]*[,.;:!?)\"']*$")
LEAST_WORDS, LEAST_PART = 6, 0.8
"""Prose has this many words, and this part of what stands between its spaces is English words."""

HELD_OUT_ONE_IN = 20
"""One document of so many is held out, chosen by the hash of its name, with every paragraph that it has."""
HELD_OUT_PARAGRAPH = 200
"""Characters from which on a held-out paragraph is long enough to measure with."""
HELD_OUT_CHARACTERS = 24_000
"""Length of the held-out text that is kept beside the model."""


def documents() -> dict[str, list[str]]:
    """Name → paragraphs of prose, of everything that ships with the Python that runs; in a fixed order."""
    from pydoc_data.topics import topics

    found = {f"topic {name}": _paragraphs([text]) for name, text in sorted(topics.items())}
    for name in TEXTS:
        found[name] = _paragraphs([(LIBRARY / name).read_text(encoding="utf-8", errors="replace")])
    for path in sorted(LIBRARY.rglob("*.py")):
        name = path.relative_to(LIBRARY)
        if not LEFT_OUT & set(name.parts) and not name.name.startswith("_sysconfigdata"):
            source = path.read_text(encoding="utf-8", errors="replace")
            found[str(name)] = _paragraphs([*_docstrings(source), *_comments(source)])
    return {name: paragraphs for name, paragraphs in found.items() if paragraphs}


def split(found: Mapping[str, list[str]]) -> tuple[list[str], list[str]]:
    """The documents to train on, each as one text without repetitions, and the paragraphs held out.

    No paragraph is in both, whatever document it stands in.
    """
    held_out = dict.fromkeys(p for name in found if _is_held_out(name) for p in found[name])
    seen = set(held_out)
    training = []
    for paragraphs in found.values():
        new = [p for p in dict.fromkeys(paragraphs) if p not in seen]
        seen.update(new)
        if new:
            training.append("\n\n".join(new))
    return training, list(held_out)


def held_out_text(paragraphs: Iterable[str]) -> str:
    """The long ones of the held-out paragraphs, in an order by hash, as one text of the wanted length."""
    text: list[str] = []
    size = 0
    for paragraph in sorted(paragraphs, key=_number):
        if len(paragraph) >= HELD_OUT_PARAGRAPH and size + len(paragraph) <= HELD_OUT_CHARACTERS:
            text.append(paragraph)
            size += len(paragraph) + 2
    return "\n\n".join(text) + "\n"


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is English, rather than a table, a signature or code."""
    words = paragraph.split()
    return len(words) >= LEAST_WORDS and sum(bool(WORD.match(word)) for word in words) >= LEAST_PART * len(words)


def _paragraphs(texts: Iterable[str]) -> list[str]:
    lines = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text))
    return [line for line in lines if is_prose(line) and line.isascii()]


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # lib2to3 ships files that are wrong on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _comments(source: str) -> Iterator[str]:
    """Comments of two lines and more: shorter ones are notes about a line of code."""
    block: list[str] = []
    for line in [*source.splitlines(), ""]:
        text = line.strip()
        if text.startswith("# ") or text == "#":
            block.append(text[2:])
            continue
        if len(block) > 1:
            yield "\n".join(block)
        block = []


def _is_held_out(name: str) -> bool:
    return _number(name) % HELD_OUT_ONE_IN == 0


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])

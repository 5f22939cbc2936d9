"""Build the sections of a page from files, this machine and its workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ...devices import detect_device
from ...errors import DispatchError, text_of
from ...hosting.records.runs import folder as runs_folder
from ...version import __version__
from ..origin import machine
from . import accuracy, engines, selection, shadow, speed, tuning, verification
from .files import Source, read, records
from .page import Origin, Part, Report, Section


class Kind(Protocol):
    """A module that knows one kind of file."""

    EMPTY: Section
    """The section without its parts."""

    def is_one(self, data: Mapping[str, Any]) -> bool: ...

    def parts(self, sources: Iterable[Source]) -> list[Part]: ...

    def summary(self, sources: list[Source]) -> tuple[tuple[str, str], str]: ...


KINDS: tuple[Kind, ...] = (verification, accuracy, speed, tuning, shadow, engines)
"""The sections after the first, in their order; each recognises its files."""
NOT_SHOWN = "not shown: no section of this page is made of such a file"


def build(paths: Sequence[Path], with_runs: bool = True, strict: bool = False) -> Report:
    """Build the page about these files and folders, this machine, and its workers.

    Args:
        paths: results of other commands, or folders of them.
        with_runs: whether to show the records of this user's workers.
        strict: refuse figures without an origin instead of marking them.

    Raises:
        DispatchError: a file is missing or malformed, a named file is of no known kind, or, if strict, a file does
            not state the origin of its figures.
    """
    sources = read(paths)
    given = {source.path.resolve() for source in sources}
    left = records(runs_folder()) if with_runs else []
    kept = [source for source in left if source.path.resolve() not in given and _is_whole(source)]
    shown: dict[Path, str] = {}
    sections = [_selection(sources, kept, shown)]
    for kind in KINDS:
        sections.append(_section(kind, [source for source in (*sources, *kept) if kind.is_one(source.data)], shown))
    for source in sources:
        if source.named and source.path not in shown:
            raise DispatchError(
                f"{source.path} is none of the files that a report is made of: results of fl verify, fl bench, "
                "fl tune, fl perplexity, fl demo, shadow mode, or a benchmark of engines"
            )
    bare = {source.path: ", ".join(source.origin.lacks) for source in sources if source.path in shown}
    if strict and (refused := [f"{path} does not say its {lacks}" for path, lacks in bare.items() if lacks]):
        raise DispatchError(f"figures without their origin: {'; '.join(refused)}")
    shown.update((path, f"{shown[path]}; lacks {lacks}") for path, lacks in bare.items() if lacks)
    made = f"fl-dispatch {__version__}, {time.strftime('%Y-%m-%d %H:%M')}, {_here().machine}"
    return Report(made, sections, [(str(source.path), shown.get(source.path, NOT_SHOWN)) for source in sources])


T = TypeVar("T")

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)
"""Errors from reading a recognised file that lacks a value, or has one of another type."""


def _is_whole(record: Source) -> bool:
    """Whether an unnamed worker's record can be shown; another version's record may be incomplete."""
    try:
        selection.workers([record])
        shadow.parts([record])
    except MALFORMED:
        return False
    return True


def _selection(sources: list[Source], kept: list[Source], shown: dict[Path, str]) -> Section:
    own = selection.here(_here())
    served = [source for source in sources if selection.is_one(source.data)]
    ran = [source for source in (*sources, *kept) if source.is_worker]
    parts = [own, *_guarded(selection.EMPTY, ran, selection.workers)]
    parts += _guarded(selection.EMPTY, served, selection.served)
    shown.update((source.path, selection.EMPTY.title) for source in (*ran, *served))
    summary, tone = selection.summary(own)
    return replace(selection.EMPTY, parts=parts, summary=summary, tone=tone)


def _section(kind: Kind, sources: list[Source], shown: dict[Path, str]) -> Section:
    empty = kind.EMPTY
    if not sources:
        return empty
    parts, (summary, tone) = _guarded(empty, sources, lambda given: (kind.parts(given), kind.summary(given)))
    for source in sources:
        shown[source.path] = ", ".join(filter(None, (shown.get(source.path), empty.title)))
    return replace(empty, parts=parts, summary=summary, tone=tone)


def _guarded(section: Section, sources: list[Source], made: Callable[[list[Source]], T]) -> T:
    """Return what a function makes of the files.

    Raises:
        DispatchError: a recognised file lacks a value, or has one of another type.
    """
    try:
        return made(sources)
    except MALFORMED as error:
        if len(sources) > 1:
            for source in sources:
                _guarded(section, [source], made)
        guilty = ", ".join(str(source.path) for source in sources)
        raise DispatchError(
            f"{guilty} looks like a file for the section '{section.title}', but is not as `{section.fill}` writes it: "
            f"{text_of(error)}"
        ) from error


def _here() -> Origin:
    spec = detect_device()
    found = machine(torch.device(spec.torch_type))
    return Origin("this machine", found["date"], f"{spec.name} ({found['device']})", list(found["versions"].items()))

"""Exact? The perplexities that ``fl perplexity`` found, against Hugging Face's in float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .files import Source
from .page import Cell, Part, Section, Table

EMPTY = Section(
    "exact",
    "Exact?",
    "Perplexity of held-out text through a real engine, against Hugging Face's in float32.",
    "fl perplexity --json perplexity.json",
)


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a file is one of ``fl perplexity``'s."""
    return {"perplexity", "tokens", "dtype", "report"} <= set(data)


def parts(sources: Iterable[Source]) -> list[Part]:
    """A part a machine and its versions, a row a file."""
    groups: dict[tuple[str, Any], list[Source]] = {}
    for source in sources:
        groups.setdefault((source.origin.machine, tuple(source.origin.versions)), []).append(source)
    return [_part(machine, group) for (machine, _), group in groups.items()]


def glance(sources: list[Source]) -> tuple[tuple[str, str], str]:
    """The number of those within their tolerance."""
    judged = [source.data["right"] for source in sources if source.data["expected"] is not None]
    right = sum(judged)
    said = "perplexities are within their dtype's tolerance"
    return (f"{right} of {len(judged)}", said), "good" if right == len(judged) else "bad"


def _part(machine: str, sources: list[Source]) -> Part:
    headings = (
        "model",
        "host",
        "dtype",
        "order",
        "#perplexity",
        "#expected",
        "#difference",
        "#tolerance",
        "verdict",
        "file",
    )
    rows = []
    for source in sources:
        data, expected = source.data, source.data["expected"]
        difference = "" if expected is None else f"{abs(data['perplexity'] - expected) / expected:.1e}"
        verdict = Cell("not compared", "quiet") if expected is None else _verdict(data["right"])
        rows.append(
            [
                Cell(str(data["model"]).rpartition("/")[2], code=True),
                Cell(str(data["host"]), note="compiled" if data["compiled"] else "eager"),
                Cell(str(data["dtype"])),
                Cell(str(data["prefer"] or "as configured")),
                Cell(f"{data['perplexity']:.4f}", note=f"{data['tokens']:,} tokens of {data['text']}"),
                Cell("" if expected is None else f"{expected:.4f}"),
                Cell(difference),
                Cell(f"{data['tolerance']:.0e}"),
                verdict,
                Cell(source.path.name, code=True),
            ]
        )
    return Part(machine or sources[0].path.name, sources[0].origin, tables=[Table("Perplexities", headings, rows)])


def _verdict(right: bool) -> Cell:
    return Cell("right", "good") if right else Cell("wrong", "bad")

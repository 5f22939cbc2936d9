"""The section "Exact?": perplexities from ``fl perplexity``, compared with Hugging Face's in float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .files import Source
from .page import Cell, Part, Section, Table

EMPTY = Section(
    "exact",
    "Exact?",
    "Perplexity of held-out text through a real engine, against Hugging Face's in float32.",
    "fl perplexity --out perplexity.json",
)


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a file is a result of ``fl perplexity`` or of the benchmark of quantized checkpoints."""
    return {"perplexity", "tokens", "dtype", "report"} <= set(data) or _is_of_schemes(data)


def _is_of_schemes(data: Mapping[str, Any]) -> bool:
    return isinstance(data.get("schemes"), Mapping)


def parts(sources: Iterable[Source]) -> list[Part]:
    """Make a part for each machine and its versions, with a row per file, and one per file of quantized checkpoints."""
    groups: dict[tuple[str, Any], list[Source]] = {}
    quantized = []
    for source in sources:
        if _is_of_schemes(source.data):
            quantized.append(_schemes(source))
        else:
            groups.setdefault((source.origin.machine, tuple(source.origin.versions)), []).append(source)
    return [*(_part(machine, group) for (machine, _), group in groups.items()), *quantized]


def summary(sources: list[Source]) -> tuple[tuple[str, str], str]:
    """Return the number of perplexities within their tolerance."""
    plain = [source.data for source in sources if not _is_of_schemes(source.data)]
    if not plain:
        return (str(sum(len(source.data["schemes"]) for source in sources)), "checkpoints have their perplexity"), ""
    judged = [data["right"] for data in plain if data["expected"] is not None]
    right = sum(judged)
    said = "perplexities are within their dtype's tolerance"
    return (f"{right} of {len(judged)}", said), "good" if right == len(judged) else "bad"


def _part(machine: str, sources: list[Source]) -> Part:
    rows = []
    for source in sources:
        data, expected = source.data, source.data["expected"]
        difference = "" if expected is None else f"{abs(data['perplexity'] - expected) / expected:.1e}"
        verdict = Cell("not compared", "quiet") if expected is None else _verdict(data["right"])
        rows.append(
            {
                "model": Cell(str(data["model"]).rpartition("/")[2], code=True),
                "host": Cell(str(data["host"]), note="compiled" if data["compiled"] else "eager"),
                "dtype": Cell(str(data["dtype"])),
                "order": Cell(str(data["prefer"] or "as configured")),
                "#perplexity": Cell(f"{data['perplexity']:.4f}", note=f"{data['tokens']:,} tokens of {data['text']}"),
                "#expected": Cell("" if expected is None else f"{expected:.4f}"),
                "#difference": Cell(difference),
                "#tolerance": Cell(f"{data['tolerance']:.0e}"),
                "verdict": verdict,
                "file": Cell(source.path.name, code=True),
            }
        )
    return Part(machine or sources[0].path.name, sources[0].origin, tables=[Table.of("Perplexities", rows)])


def _schemes(source: Source) -> Part:
    """Show perplexities of quantized checkpoints in each dtype, and their distance from the dequantized network's."""
    schemes, host = source.data["schemes"], str(source.data["host"])
    dtypes = list(dict.fromkeys(dtype for found in schemes.values() for dtype in found["engines"]))
    rows = []
    for name, found in schemes.items():
        engines = [
            Cell(f"{found['engines'][dtype]:.4f}", note=f"{found['differences'][dtype]:+.1e}")
            if dtype in found["engines"]
            else Cell("")
            for dtype in dtypes
        ]
        rows.append([Cell(name), Cell(f"{found['right']:.4f}"), *engines])
    headings = ("checkpoint", "#Hugging Face's, dequantized", *(f"#{dtype}" for dtype in dtypes))
    table = Table("Perplexities of quantized checkpoints, and their relative differences", headings, rows)
    heading = ", ".join(filter(None, (f"Quantized, {host}", source.origin.machine)))
    return Part(heading, source.origin, tables=[table])


def _verdict(right: bool) -> Cell:
    return Cell("right", "good") if right else Cell("wrong", "bad")

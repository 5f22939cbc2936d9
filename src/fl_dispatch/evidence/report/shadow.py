"""The section "Shadow": live calls that were computed twice, and the differences of their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .files import Source, moment
from .page import Cell, Part, Section, Table

EMPTY = Section(
    "shadow",
    "Shadow",
    "Live calls that a second implementation computed too, and the differences beyond the operator's tolerance.",
    "VLLM_FL_SHADOW_SHARE=0.01 vllm serve MODEL",
)


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a worker's record has results of shadow mode."""
    return _shadow(data) is not None


def parts(sources: Iterable[Source]) -> list[Part]:
    """Make a part for each worker."""
    found = ((source, _shadow(source.data)) for source in sources)
    return [_part(source, shadow) for source, shadow in found if shadow is not None]


def summary(sources: list[Source]) -> tuple[tuple[str, str], str]:
    """Return the number of implementations with a finding, and the tone."""
    found = [_shadow(source.data) or {} for source in sources]
    findings = [finding for one in found for finding in one["findings"]]
    count = len({(finding["operator"], finding["implementation"]) for finding in findings})
    who = "implementation" if count == 1 else "implementations"
    differed = sum(finding["calls"] for finding in findings)
    compared = sum(sum(one.get("compared", {}).values()) for one in found)
    return (str(count), f"{who} differed, in {differed:,} of {compared:,} compared calls"), "bad" if count else "good"


def _shadow(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    choices = data.get("choices")
    found = choices.get("shadow") if isinstance(choices, Mapping) else None
    return found if isinstance(found, Mapping) and isinstance(found.get("findings"), list) else None


def _part(source: Source, found: Mapping[str, Any]) -> Part:
    cost = f"{found.get('share_of_time', 0):.2%} of the process's time"
    lead = [f"A share of {found['share']:g} of the calls also ran {found['second']}, which took {cost}."]
    rows = [
        {
            "operator": Cell(str(one["operator"]), code=True),
            "implementation": Cell(str(one["implementation"]), code=True),
            "compared with": Cell(str(one["second"]), code=True),
            "arguments": Cell(str(one["kind"])),
            "#calls": Cell(f"{one['calls']:,}"),
            "#worst, in tolerances": Cell("no number" if one["worst"] is None else f"{one['worst']:.3g}", "bad"),
            "when": Cell(f"{moment(one['first'])} to {moment(one['last'])}"),
            "outcome": Cell(str(one["outcome"])),
            "example": Cell(str(one["example"])),
        }
        for one in found["findings"]
    ]
    tables = [Table.of("What differed, by kind of arguments", rows)] if rows else []
    if not rows:
        lead.append("Nothing differed by more than an operator tolerates.")
    compared = [
        [*(Cell(name, code=True) for name in pair.split(" ", 1)), Cell(f"{calls:,}")]
        for pair, calls in found.get("compared", {}).items()
    ]
    if compared:
        columns = ("operator", "implementation", "#calls")
        tables.append(Table("Calls that were compared", columns, compared, f"all {len(compared)}"))
    unfit = [[Cell(name, code=True), Cell(str(why))] for name, why in found.get("not_compared", {}).items()]
    if unfit:
        tables.append(Table("Operators without a second run", ("operator", "why"), unfit, f"all {len(unfit)}"))
    title = f"Process {source.data.get('pid')} of {source.data.get('host')}"
    return Part(title, source.origin, lead, tables=tables)

"""The report of an investigation, as text and as JSON."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.status import Status

from ...evidence.bisect.documents import text
from ...evidence.bisect.findings import Blamed, Result, log2_runs
from ...evidence.bisect.probes import Outcome
from ...evidence.bisect.yardstick import FACTOR, Verdict
from ..engines import Start
from ..output import Rows, console

COLUMNS = {
    "run": 4,
    "what was switched": 58,
    "difference": 10,
    "verdict": 9,
    "engine": 8,
    "seconds": 7,
    "largest at": 0,
}
SHOWN = 4
"""Largest number of layers that a sentence names."""


class Report:
    """Prints questions and answers as they come, then the findings.

    Args:
        quiet: print nothing, because standard output belongs to the JSON.

    Attributes:
        rows: each run as plain data.
        huggingface: distance of the good policy from Hugging Face in yardsticks, if it was requested.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.runs, self.starts = quiet, 0, 0
        self.rows: list[dict[str, Any]] = []
        self.huggingface: float | None = None
        self._table = Rows(COLUMNS, quiet)
        self._began = time.monotonic()
        self._status: Status | None = None

    def begin(self, start: Start, folder: Path, tokens: list[list[int]]) -> None:
        """Begin an investigation: reset the rows, and print its subject."""
        self._table, self._began = Rows(COLUMNS, self.quiet), time.monotonic()
        self.rows, self.huggingface = [], None
        way = "eager" if start.eager else "compiled"
        ranks = f", tensor parallel {start.ranks}" if start.ranks > 1 else ""
        self.say(f"{start.host.product}, {way}{ranks}, {start.model}")
        self.say(f"{len(tokens)} prompts of {', '.join(str(len(one)) for one in tokens)} tokens; record: {folder}")
        self.say("yardstick: the trusted policy, in harmless changes …")

    def say(self, line: str) -> None:
        """Print a line between the rows."""
        self._table.say(line, "dim")

    def agrees(self, share: float) -> None:
        """Report that Hugging Face agrees with the good policy, at a distance of ``share`` yardsticks."""
        self.huggingface = share
        self.say(f"Hugging Face agrees with the trusted policy: {share:.2f} yardsticks")

    def begins(self, what: str) -> None:
        """Show a question to an engine in a terminal until it answers."""
        self.ended()
        if not self.quiet and console.is_terminal:
            self._status = console.status(what)
            self._status.start()

    def ended(self) -> None:
        """Stop the status line after the last question."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def asked(self, what: str, outcome: Outcome, kept: bool) -> None:
        """Record and print the answer to a question."""
        self.ended()
        number = len(self.rows) + 1
        self.rows.append({"what": what, **outcome.as_data(), "kept": kept})
        engine = "kept" if kept else "started" if outcome.started else "switched"
        shown = "-" if outcome.verdict is Verdict.FAILS else f"{outcome.share:.2f}"
        where = outcome.where if outcome.verdict is Verdict.DIFFERS else ""
        self._table.add((number, what, shown, outcome.verdict.value, engine, f"{outcome.seconds:.1f}", where))
        if outcome.note:
            self._table.say(f"      {outcome.note}", "dim")

    def show(self, result: Result, out: Path | None) -> None:
        """Print the findings."""
        for note in result.notes:
            self.say(f"note: {note}")
        if not result.differs and result.slower_than:
            times = f"{result.share:.2f} times the trusted policy's time"
            console.print(f"The policy is not slower: {times}. Nothing is blamed.", style="bold green", highlight=False)
            return
        if not result.differs:
            console.print(
                f"The policies agree: {result.share:.2f} yardsticks, and rounding explains up to {FACTOR:g}. "
                "Nothing is blamed.", style="bold green", highlight=False,
            )  # fmt: skip
            return
        for one in result.blamed:
            console.print(sentence(one), style="bold red", highlight=False, markup=False)
        console.print(self.cost(result), highlight=False)
        if result.policy is None:
            return
        if result.agrees:
            console.print("An engine that was started with this policy agrees:", style="bold green")
        else:
            console.print("An engine that was started with this policy still differs:", style="bold red")
        print(text(result.policy), end="")
        if out is not None:
            console.print(f"It is in {out}: VLLM_FL_CONFIG={out}", highlight=False)

    @property
    def seconds(self) -> float:
        """Return the seconds since the investigation began."""
        return time.monotonic() - self._began

    def cost(self, result: Result) -> str:
        """Return the number of runs in words."""
        sites, units = result.candidates
        searched = sum(1 for row in self.rows if ":" in row["what"] and not row["what"].startswith("control"))
        return (
            f"{searched} runs searched among {sites} sites of {units} operators and settings (2 log2: "
            f"{log2_runs(sites):.1f}); with yardstick and checks {self.runs} runs, {self.starts} engine starts, "
            f"{self.seconds:.0f} s"
        )

    def head(self, result: Result) -> str:
        """Return the comment at the top of the written policy."""
        return "Written by fl bisect.\n" + "\n".join(sentence(one) for one in result.blamed)

    def as_data(self, result: Result) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "differs": result.differs,
            "share": result.share,
            "yardstick": result.yardstick.as_data(),
            "huggingface": self.huggingface,
            "blamed": [one.as_data() for one in result.blamed],
            "policy": result.policy,
            "agrees": result.agrees,
            "candidates": {"sites": result.candidates[0], "units": result.candidates[1]},
            "notes": result.notes,
            "runs": self.runs,
            "starts": self.starts,
            "rows": self.rows,
        }


def sentence(one: Blamed) -> str:
    """Return the cause in one line."""
    ranks = f", at rank {', '.join(map(str, one.ranks))} alone" if one.ranks else ""
    beside = f", only beside the other choice of {', '.join(one.partners)}" if one.partners else ""
    if not one.sites:
        kinds = f" ({', '.join(one.kinds)})" if one.kinds else ""
        return ": ".join(filter(None, (one.op, ", ".join(one.implementations)))) + kinds + beside
    names = [str(site) for site in one.sites]
    layers = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    if len(one.sites) == one.of:
        sampled = " (some were asked alone)" if one.everywhere else ""
        layers = f"all {one.of} layers{sampled}" if one.of > 1 else names[0]
    return f"{one.op}: {', '.join(one.implementations)} in {layers}{ranks}{beside}"

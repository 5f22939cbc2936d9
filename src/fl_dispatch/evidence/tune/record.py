"""The findings of a tuning as data, stored while it runs; another run can resume it or compare with it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...errors import DispatchError
from .calls import Key, TunedCase
from .choice import Choice, Figure, choose, choose_together
from .model import read_json
from .race import Outcome
from .rules import Group, group_of

TOGETHER = "together"
"""The fact that names operators with one winner for all sizes."""


@dataclass
class Record:
    """The findings of a tuning so far.

    Args:
        facts: the conditions of the findings: machine, versions, driver, model, and method. Findings under others are
            not reused.
        cases: a shape's name → its key, its calls per step, and candidate → outcome.
        late: operator → candidate → the kernel that it compiles after the start.
        between, above: key → candidate → its proofs at sizes between the measured ones, and above the largest.
        seed: the seed of these sizes.
        file: the file of an earlier run.
    """

    facts: Mapping[str, Any]
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    late: dict[str, dict[str, str]] = field(default_factory=dict)
    between: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    above: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    seed: int = field(default_factory=lambda: secrets.randbits(32))
    file: Path | None = None

    def keep(self, tuned: TunedCase, outcomes: Mapping[str, Outcome]) -> None:
        """Record one shape; ``outcomes`` has the candidates in the default order."""
        self.cases[tuned.name] = {
            "key": asdict(tuned.key),
            "times": tuned.times,
            "candidates": {impl_id: outcome.as_data() for impl_id, outcome in outcomes.items()},
        }

    def outcomes(self) -> list[Mapping[str, Any]]:
        """Return the outcomes of all candidates at all shapes."""
        return [outcome for case in self.cases.values() for outcome in case["candidates"].values()]

    def figures(self) -> dict[Key, list[Figure]]:
        """Return key → the figures of its candidates, summed over its shapes."""
        shapes: dict[Key, list[dict[str, Any]]] = {}
        for case in self.cases.values():
            shapes.setdefault(Key(**case["key"]), []).append(case)
        found: dict[Key, list[Figure]] = {}
        for key, cases in shapes.items():
            names = list(dict.fromkeys(name for case in cases for name in case["candidates"]))
            found[key] = [self._figure(key, name, cases) for name in names]
        return found

    def _figure(self, key: Key, impl_id: str, cases: Sequence[Mapping[str, Any]]) -> Figure:
        parts = [(case["times"], case["candidates"].get(impl_id)) for case in cases]
        late = self.late.get(key.op_name, {}).get(impl_id, "")
        problems = [
            late,
            self.why_not_between(key, impl_id),
            *("not a candidate for every shape" if one is None else one["problem"] for _, one in parts),
        ]
        timed = [(times, one["us"]) for times, one in parts if one is not None and one["us"]]
        seconds: tuple[float, ...] = ()
        if len(timed) == len(parts):
            rows = zip(*(([value * times / 1e6 for value in us]) for times, us in timed), strict=False)
            seconds = tuple(map(sum, rows))
        return Figure(impl_id, seconds, next(filter(None, problems), ""))

    def why_not_between(self, key: Key, impl_id: str) -> str:
        """Return why a candidate must not serve the sizes of a key's rule, or empty.

        Of an operator with one winner for all sizes, that includes the sizes above the largest measured one.
        """
        kinds = (self.between, self.above) if key.op_name in self.facts.get(TOGETHER, ()) else (self.between,)
        found = (kind.get(str(key), {}).get(impl_id, {}).get("problem", "") for kind in kinds)
        return next(filter(None, found), "")

    def bounded(self) -> dict[Group, tuple[str, ...]]:
        """Return the groups with a largest size for their winner, and the order of the rule above it.

        It is the reference if the winner is wrong above, because the default order may begin with the same winner. It
        is empty if the reference can compute no size above. Then one winner at all sizes stays nevertheless, because a
        condition would keep it out of compiled models.
        """
        found: dict[Group, tuple[str, ...]] = {}
        choices = {key: choice.impl_id for key, choice in self.choices().items()}
        for key, winner in choices.items():
            tried = self.above.get(str(key), {}).get(winner)
            if tried is None or key.op_name in self.facts.get(TOGETHER, ()):
                continue
            others = {one for other, one in choices.items() if other.op_name == key.op_name}
            if tried["problem"] or (not tried["proven"] and tried["too_large"] and len(others) > 1):
                found[group_of(key)] = ("reference",) if tried["problem"] else ()
        return found

    def served(self, key: Key, impl_id: str) -> str:
        """Return in words the sizes other than a key's own at which its winner was compared with the reference."""
        said = []
        for kind, name in ((self.between, "sizes between"), (self.above, "sizes above")):
            tried = kind.get(str(key), {}).get(impl_id)
            if tried is None or not any(tried.values()):
                continue
            if tried["problem"]:
                said.append(f"{name}: {tried['problem']}")
                continue
            of = {"proven": "right at", "declined": "declined at", "too_large": "too large for the reference:"}
            words = [f"{text} {', '.join(map(str, sorted(set(tried[one]))))}" for one, text in of.items() if tried[one]]
            said.append(f"{name}: {'; '.join(words)}")
        return "; ".join(said)

    def choices(self) -> dict[Key, Choice]:
        """Return key → winner, and why. Operators that the facts name under :data:`TOGETHER` have one winner each."""
        figures = self.figures()
        found = {key: choose(candidates) for key, candidates in figures.items()}
        for op_name in self.facts.get(TOGETHER, ()):
            own = [key for key in figures if key.op_name == op_name]
            found |= dict.fromkeys(own, choose_together([figures[key] for key in own]))
        return found

    def as_data(self, complete: bool) -> dict[str, Any]:
        """Return plain data for programs."""
        keys = [
            {
                **asdict(key),
                "chosen": choice.impl_id,
                "why": choice.why,
                "candidates": {figure.impl_id: _row(figure) for figure in self.figures()[key]},
            }
            for key, choice in (self.choices().items() if complete else ())
        ]
        sizes = {"seed_of_sizes": self.seed, "between": self.between, "above": self.above}
        return {"complete": complete, **self.facts, "late": self.late, "keys": keys, "cases": self.cases, **sizes}


def _row(figure: Figure) -> dict[str, Any]:
    if not figure.seconds:
        return {"problem": figure.problem}
    low, high = figure.bounds
    numbers = {name: round(value * 1e6, 3) for name, value in (("us", figure.median), ("low", low), ("high", high))}
    return {**numbers, "repeats": len(figure.seconds), "problem": figure.problem}


def read_record(file: Path) -> dict[str, Any]:
    """Read a file that a tuning wrote.

    Raises:
        DispatchError: the file is missing, or not the evidence of a tuning.
    """
    data = read_json(file, ", so the measurements of the tuning beside it are unknown")
    if not isinstance(data, dict) or not isinstance(data.get("cases"), dict):
        raise DispatchError(f"{file} is no evidence of a tuning")
    return data


def resumed(files: Iterable[Path], facts: Mapping[str, Any]) -> Record:
    """Return the record to continue: that of the first file with the same facts, with its threads, or an empty one."""
    plain = json.loads(json.dumps(facts))
    for file in files:
        try:
            data = read_record(file)
        except DispatchError:
            continue
        if all(data.get(name) == value for name, value in plain.items() if name not in UNIMPORTANT):
            threads = {"threads": data["threads"]} if "threads" in data else {}  # a tuning has one number of threads
            sizes = data.get("between", {}), data.get("above", {}), data.get("seed_of_sizes") or secrets.randbits(32)
            return Record({**facts, **threads}, data["cases"], data.get("late", {}), *sizes, file)
    return Record(facts)


UNIMPORTANT = frozenset({"date", "command", "threads", TOGETHER})
"""Facts that may differ between a run and the run that resumes it."""


def winners_of(data: Mapping[str, Any]) -> dict[Key, str]:
    """Return key → winner, from a complete file."""
    return {
        Key(row["op_name"], row["dtype"], row["tokens"], row["phase"]): row["chosen"] for row in data.get("keys", ())
    }

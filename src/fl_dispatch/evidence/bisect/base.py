"""The base of all comparisons: the good policy's scores, and the effect of harmless changes on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import DispatchError
from .choices import Choices, renamed
from .documents import Document, of_choices
from .inside import moved_id
from .probes import REPEATS, Engine, EngineDiedError, Probes, least_seconds
from .prompts import other_composition
from .scores import Difference, Scores, difference
from .yardstick import MOVES, Yardstick, is_blind


@dataclass(frozen=True)
class Base:
    """Measurements under the good policy.

    Args:
        scores: scores of all requests.
        yardstick: the effect of harmless changes on the scores.
        chosen: the implementations that ran.
        called: the operators that were called.
        ranks: number of ranks of an engine.
    """

    scores: Scores
    yardstick: Yardstick
    chosen: Choices
    called: frozenset[str]
    ranks: int


def measure(probes: Probes, good: Document, graphs: bool, say: Callable[[str], None]) -> Base:
    """Measure the base, or read it from the journal; probes compare with it from then on.

    If times are judged, no results are perturbed.

    Args:
        graphs: whether engines compile or capture, so that results are perturbed in an eager engine.
        say: gets the effect of each harmless change.

    Raises:
        DispatchError: the good policy's engine does not run, or harmless changes break every number.
    """
    kept = probes.journal.get("base")
    if kept is None:
        probes.begin("the trusted policy, in harmless changes")
        try:
            kept = _measured(probes, good, graphs)
        except EngineDiedError as error:
            raise DispatchError(f"the engine under the trusted policy fails: {error}") from error
        probes.journal.put("base", kept)
    probes.runs += 1 + REPEATS if probes.slower_than else 2 + MOVES + graphs
    probes.starts += 1 + graphs
    harmless = {name: Difference(one["largest"], one["mean"]) for name, one in kept["harmless"].items()}
    for name, one in harmless.items():
        say(f"  {name}: largest {one.largest:.2g}, mean {one.mean:.2g}")
    yardstick = Yardstick.of(harmless.values())
    if is_blind(yardstick):
        raise DispatchError("the trusted policy gives no numbers, or none that repeat")
    if probes.slower_than:
        say(f"the engine's own time for all requests: {kept['seconds']:.2f} s")
    else:
        say(f"yardstick: largest {yardstick.largest:.2g}, mean {yardstick.mean:.2g}")
    probes.base, probes.yardstick = Scores(kept["scores"], (kept["seconds"],)), yardstick
    probes.good, probes.of_good = good, Choices.of(kept["chosen"])
    return Base(probes.base, yardstick, probes.of_good, frozenset(kept["called"]), kept["ranks"])


def _measured(probes: Probes, good: Document, graphs: bool) -> dict[str, Any]:
    engine = probes.start(good)
    base, chosen = engine.score(), engine.answers()[0]
    seconds, harmless = sum(base.parts), dict[str, Difference]()
    if probes.slower_than:
        seconds = least_seconds(engine)
    else:
        harmless["the same again"] = difference(base, engine.score())
        if composed := _composed(base):
            harmless["another composition of the batch"] = composed
    moving, start = engine, base
    if graphs:
        moving = probes.start(good, eager=True)
        start = moving.score()
    called = sorted(Choices.of(moving.answers()[0]).ran or ())
    if not probes.slower_than:
        _move(moving, good, start, harmless)
    probes.stop()
    plain = {name: one.as_data() for name, one in harmless.items()}
    return {
        "chosen": chosen,
        "called": called,
        "scores": base.as_data(),
        "harmless": plain,
        "ranks": moving.ranks,
        "seconds": seconds,
    }


def _move(engine: Engine, good: Document, start: Scores, harmless: dict[str, Difference]) -> None:
    chosen = Choices.of(engine.answers()[0])
    document = of_choices({site: renamed(branches, moved_id) for site, branches in chosen.at.items()}, good)
    for seed in range(1, MOVES + 1):
        if why := engine.switch(document, seed, None):
            raise DispatchError(f"results cannot be moved at random in this engine: {why}")
        harmless[f"results moved at random, {seed}"] = difference(start, engine.score())


def _composed(base: Scores) -> Difference | None:
    """Return the distance between the same prompts in two compositions of the batch."""
    labels = {label: other for label in base.rows if (other := other_composition(label)) in base.rows}
    if not labels:
        return None
    first = Scores({label: base.rows[label] for label in labels})
    return difference(first, Scores({label: base.rows[other] for label, other in labels.items()}))

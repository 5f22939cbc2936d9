"""Runs of real engines, one for each question.

A live engine is switched if its choices can follow; otherwise a new engine starts.
Every answer is stored in the journal, so a repeated question costs nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import DispatchError
from .choices import Branches, Choices, Site, start_only
from .documents import BLACKLIST, OF_ATEN, Document, blacklisting, of_choices, other_settings
from .journal import Journal
from .scores import CLIPPED, Scores, difference
from .turns import alternate, lower_quartile
from .yardstick import Verdict, Yardstick, is_close, verdict

REPEATS = 3
"""Runs of a question that one run does not decide."""


class EngineDiedError(DispatchError):
    """An engine that did not start, died, or gave no answer in time."""


class Engine(Protocol):
    """One engine of a host."""

    ranks: int

    def switch(self, document: Document, seed: int | None, ranks: Collection[int] | None) -> str:
        """Switch some ranks, or all, to another policy; return why that is impossible, or nothing.

        Raises:
            EngineDiedError: it died.
        """

    def score(self) -> Scores:
        """Run all requests, with empty caches.

        Raises:
            EngineDiedError: it died.
        """

    def watch(self, operator: str) -> None:
        """Compare the calls of a PyTorch operator until the next :meth:`answers`, which include the findings."""

    def answers(self) -> list[dict[str, Any]]:
        """Return each rank's :func:`~fl_dispatch.evidence.bisect.inside.answer`."""

    def stop(self) -> None:
        """End the engine."""


class Engines(Protocol):
    """The starter of engines."""

    def start(self, document: Document, eager: bool = False) -> Engine:
        """Start an engine under a policy; ``eager``: neither compiled nor captured, whatever the settings say.

        Raises:
            EngineDiedError: it did not start.
        """


@dataclass(frozen=True)
class Outcome:
    """The answer to one question.

    Args:
        verdict: the verdict.
        share: the difference in yardsticks, the median of several runs.
        where: the request and position of the largest difference.
        started: whether an engine was started for it.
        seconds: seconds that it took.
        note: why an engine had to be started, or died.
    """

    verdict: Verdict
    share: float
    where: str = ""
    started: bool = False
    seconds: float = 0.0
    note: str = ""

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**vars(self), "verdict": self.verdict.value}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Outcome:
        """Make an outcome from :meth:`as_data`."""
        return cls(**{**data, "verdict": Verdict(data["verdict"])})


@dataclass(frozen=True)
class Ranks:
    """Some ranks of an engine.

    Args:
        those: numbers of these ranks.
        elsewhere: the document for the others.
    """

    those: frozenset[int]
    elsewhere: Document


@dataclass
class _Live:
    """A running engine, the settings that it started with, and its choices at the start."""

    engine: Engine
    settings: Document
    started_with: Choices


Tell = Callable[[str, Outcome, bool], None]
"""Called after each question with the question, the answer, and whether the answer is from the journal."""


class Probes:
    """The questions of an investigation to engines.

    Args:
        engines: starts engines.
        journal: the earlier answers.
        tell: receives each answer.
        switching: whether a live engine may be switched.
        begin: gets the next question, if an engine has to answer it.
        slower_than: judge times instead of logits: a policy differs if it takes more than this multiple of the trusted
            policy's time, measured alternately in the same engine.

    Attributes:
        runs, starts: numbers of questions (including the base's runs) and of starts, including those in the journal.
        good, of_good: the trusted policy, and its choices.
    """

    def __init__(
        self,
        engines: Engines,
        journal: Journal,
        tell: Tell,
        switching: bool = True,
        begin: Callable[[str], None] = lambda what: None,
        slower_than: float = 0.0,
    ) -> None:
        self.slower_than = slower_than
        self.engines, self.journal, self.tell, self.switching, self.begin = engines, journal, tell, switching, begin
        self.runs = self.starts = 0
        self.base: Scores | None = None
        self.good, self.of_good = Document(), Choices({})
        self.yardstick: Yardstick | None = None
        self._live: _Live | None = None
        self._shown: set[str] = set()  # questions with an answer that was shown
        self._fixed: set[Site] = set()  # sites where only a start showed a change of the choice

    # -- engines

    def start(self, document: Document, eager: bool = False) -> Engine:
        """Start an engine, replacing the running one."""
        self.stop()
        engine = self.engines.start(document, eager)
        chosen = Choices.of(engine.answers()[0])
        self._live = _Live(engine, other_settings(document), chosen)
        return engine

    def stop(self) -> None:
        """End the engine that runs, if one does."""
        if self._live is not None:
            self._live.engine.stop()
            self._live = None

    @property
    def can_switch(self) -> bool:
        """Whether there is a live engine that may be switched."""
        return self.switching and self._live is not None

    # -- questions

    def ask_started(self, what: str, document: Document) -> tuple[Outcome, Choices | None]:
        """Start an engine with a document and compare it with the base; return its choices, too."""
        question = f"started: {json.dumps(document, sort_keys=True)}"
        kept = self.journal.get(question)
        if kept is None:
            began, chosen = time.monotonic(), None
            self.begin(what)
            try:
                engine = self.start(document)
                chosen = engine.answers()[0]
                outcome = self._judged(document, began, True, "")
                chosen = engine.answers()[0]  # now including what ran
            except EngineDiedError as error:
                outcome = self._died(began, str(error))
            self.journal.put(question, {"outcome": outcome.as_data(), "chosen": chosen})
        else:
            outcome, chosen = Outcome.of(kept["outcome"]), kept["chosen"]
        self._report(what, question, outcome, kept is not None)
        return outcome, None if chosen is None else Choices.of(chosen)

    def ask(
        self,
        what: str,
        chosen: Mapping[Site, Branches],
        watched: Collection[Site],
        base: Document,
        ranks: Ranks | None = None,
        replaced: frozenset[str] = frozenset(),
    ) -> Outcome:
        """Compare an engine that makes these choices with the base.

        Args:
            what: the question, for people.
            chosen: site → implementations that may run there.
            watched: the sites where the choice has to hold.
            base: the document with all other settings.
            ranks: the ranks where the choices hold, and the document for the others. All by default.
            replaced: PyTorch's operators that must be replaced.
        """
        document = of_choices(chosen, base)
        question = json.dumps([document, None if ranks is None else sorted(ranks.those), self.switching])
        kept = self.journal.get(question)
        if kept is not None:
            outcome = Outcome.of(kept)
        else:
            self.begin(what)
            outcome = self._asked(document, {site: chosen[site] for site in watched}, ranks, replaced)
            self.journal.put(question, outcome.as_data())
        self._report(what, question, outcome, kept is not None)
        return outcome

    def kinds(self, operator: str, document: Document) -> list[str]:
        """Return the kinds of arguments for which a PyTorch operator is wrong in an eager engine, if any."""
        question = f"kinds: {operator} {json.dumps(document, sort_keys=True)}"
        if (kept := self.journal.get(question)) is None:
            try:
                live = self._live if self.can_switch else None
                if live is None or operator not in live.started_with.aten or live.engine.switch(document, None, None):
                    self.start(document, eager=True)
                    self.starts += 1
                assert self._live is not None
                self._live.engine.watch(operator)
                self._live.engine.score()
                kept = [kind for answer in self._live.engine.answers()[:1] for kind in answer["aten"]["kinds"]]
            except EngineDiedError:
                self.stop()
                kept = []
            self.runs += 1
            self.journal.put(question, kept)
        return list(kept)

    def _asked(
        self, document: Document, expected: Mapping[Site, Branches], ranks: Ranks | None, replaced: frozenset[str]
    ) -> Outcome:
        began, note = time.monotonic(), ""
        try:
            if self.can_switch:
                note = self._switched(document, expected, ranks, replaced)
                if not note:
                    return self._judged(document, began, False, "")
            self.start(document)
            return self._judged(document, began, True, note)
        except EngineDiedError as error:
            return self._died(began, str(error))

    def _switched(
        self, document: Document, expected: Mapping[Site, Branches], ranks: Ranks | None, replaced: frozenset[str]
    ) -> str:
        """Switch the live engine; return why it cannot be switched, or nothing."""
        live = self._live
        assert live is not None
        if live.settings != other_settings(document):
            return "other settings hold from the start on"
        if new := replaced - live.started_with.aten.keys():
            return f"{min(new)} is replaced when an engine starts"
        for site, branches in expected.items():
            fixed = site in self._fixed or start_only(site.op)
            if fixed and not _holds(branches, live.started_with.at.get(site)):
                return f"{site.op} is chosen when an engine starts"
        if ranks is not None:
            live.engine.switch(ranks.elsewhere, None, None)
        if refused := live.engine.switch(document, None, None if ranks is None else ranks.those):
            self.switching = False
            return f"choices are frozen in a running engine ({refused})"
        for rank, answer in enumerate(live.engine.answers()):
            if ranks is not None and rank not in ranks.those:
                continue
            now = Choices.of(answer)
            if stays := sorted(now.aten.keys() & set(document.get(BLACKLIST, ())) or replaced - now.aten.keys()):
                return f"{stays[0]} does not follow in a running engine"
            missed = {site for site, branches in expected.items() if not _holds(branches, now.at.get(site))}
            if missed:
                self._fixed |= missed
                return f"{min(site.op for site in missed)} is chosen when an engine starts"
        return ""

    def _judged(self, document: Document, began: float, started: bool, note: str) -> Outcome:
        assert self._live is not None
        assert self.base is not None
        assert self.yardstick is not None
        engine = self._live.engine
        if self.slower_than:
            share, how = self._timed(engine, document)
            said = Verdict.SLOWER if share > self.slower_than else Verdict.AS_FAST
            return Outcome(said, share, "", started, time.monotonic() - began, "; ".join(filter(None, (note, how))))
        found = [difference(self.base, engine.score())]
        shares = [self.yardstick.share(found[0])]
        while is_close(shares[0]) and len(shares) < REPEATS:
            found.append(difference(self.base, engine.score()))
            shares.append(self.yardstick.share(found[-1]))
        said = verdict(shares)
        seconds = time.monotonic() - began
        again = f"{len(shares)} runs" if len(shares) > 1 else ""
        why = "; ".join(filter(None, (note, again)))
        return Outcome(said, sorted(shares)[len(shares) // 2], found[0].where, started, seconds, why)

    def _timed(self, engine: Engine, document: Document) -> tuple[float, str]:
        """Return the time under a policy as a multiple of the trusted one's, and how it was measured; keep the policy.

        Raises:
            DispatchError: the times vary too much to tell.
        """
        assert self.base is not None
        engine.score()  # work that only first calls do
        trusted, why = self._beside_trusted()
        if why:
            engine.switch(document, None, None)
            share = least_seconds(engine) / sum(self.base.parts)
            return share, f"the trusted policy's time is the first engine's: {why}"

        def parts(policy: Document) -> Sequence[float]:
            engine.switch(policy, None, None)  # also if it is already active: each run includes the cost of a switch
            return engine.score().parts

        engine.score()
        found = alternate(lambda: parts(document), lambda: parts(trusted), self.slower_than)
        if not found.decides(self.slower_than) and found.spread > self.slower_than:
            raise DispatchError(
                f"undecided: times vary by a factor of {found.spread:.2f}, more than the limit, so nothing is blamed "
                f"({found}); --resume asks this again"
            )
        return found.share, str(found)

    def _beside_trusted(self) -> tuple[Document, str]:
        """Switch the live engine to the trusted policy: its document there, and why it does not hold, or nothing."""
        live = self._live
        assert live is not None
        of_aten = {key: live.settings[key] for key in OF_ATEN if key in live.settings}
        if self.of_good.aten.keys() - live.started_with.aten.keys():
            return {}, "it replaces other operators"
        settings = {key: value for key, value in self.good.items() if key not in OF_ATEN} | of_aten
        replaced = (live.started_with.aten.keys() | live.started_with.aten_kept) - self.of_good.aten.keys()
        trusted = of_choices(self.of_good.at, blacklisting(settings, replaced))
        if not self.can_switch:
            return trusted, "engines are not switched"
        expected = {site: branches for site, branches in self.of_good.at.items() if site in live.started_with.at}
        return trusted, self._switched(trusted, expected, None, frozenset())

    def _died(self, began: float, why: str) -> Outcome:
        self.stop()
        return Outcome(Verdict.FAILS, CLIPPED, "", True, time.monotonic() - began, why)

    def _report(self, what: str, question: str, outcome: Outcome, kept: bool) -> None:
        if question in self._shown:
            return
        self._shown.add(question)
        self.runs += 1
        self.starts += outcome.started
        self.tell(what, outcome, kept)


def least_seconds(engine: Engine) -> float:
    """Return the engine's own time for all requests, from several runs."""
    return lower_quartile([engine.score().parts for _ in range(REPEATS)])


def _holds(wanted: Branches, found: Branches | None) -> bool:
    """Whether a choice is as wanted; other candidates may follow the wanted ones."""
    if found is None or len(wanted) != len(found):
        return False
    pairs: Sequence[Any] = list(zip(wanted, found, strict=True))
    return all(when == other and ids == given[: len(ids)] for (when, ids), (other, given) in pairs)

"""The investigation: base and yardstick, then the bad policy, then operators, layers, implementations, ranks.

Each step asks real engines (:mod:`.probes`) and searches by halving (:mod:`.search`). Finally an engine starts with the
policy that avoids the culprits; the result counts as found only if this engine agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .base import measure
from .choices import Branches, Choices, Site, differing, in_order, replaced_in_one, without
from .documents import BLACKLIST, OF_ATEN, OTHER_SETTINGS, Document, avoiding, blacklisting, of_choices
from .findings import ATEN, SETTING, Blamed, Result
from .probes import EngineDiedError, Probes, Ranks
from .search import Culprit, Found, culprits, estimate
from .yardstick import Verdict


class Investigation:
    """The investigation of two policies, a good and a bad one.

    Args:
        probes: asks engines.
        good, bad: documents of the policies.
        graphs: whether engines compile or capture; results are then perturbed in an eager one.
        say: shows a person the next step.
    """

    def __init__(self, probes: Probes, good: Document, bad: Document, graphs: bool, say: Callable[[str], None]) -> None:
        self.probes, self.good, self.bad, self.graphs, self.say = probes, good, bad, graphs, say
        self.of_good = self.of_bad = Choices({})
        self.candidates: list[Site] = []
        self.replaced: list[str] | None = None  # candidates among PyTorch's own operators
        self.world = 1

    # -- the search

    def run(self) -> Result:
        """Find the cause of the bad policy's difference, and the policy that avoids it."""
        base = measure(self.probes, self.good, self.graphs, self.say)
        self.of_good, self.world, yardstick = base.chosen, base.ranks, base.yardstick
        outcome, chosen = self.probes.ask_started("the other policy, everywhere", self.bad)
        if outcome.verdict.agrees:
            return Result(False, outcome.share, yardstick, slower_than=self.probes.slower_than)
        result = Result(True, outcome.share, yardstick, slower_than=self.probes.slower_than)
        if chosen is None:  # it did not even start, so its choices are read from an engine started with the good ones
            chosen = self._choices_of_bad()
        if outcome.verdict is Verdict.FAILS:
            result.notes.append(f"the engine fails under the other policy: {outcome.note}")
            chosen = replace(chosen, ran=None)
        self.of_bad = chosen
        self.candidates = differing(self.of_good, self.of_bad, base.called)
        self.replaced = replaced_in_one(self.of_good, self.of_bad)
        units = self._units()
        result.candidates = (len(self.candidates) + len(self.replaced or ()), len(units))
        if not units:
            result.notes.append("both policies choose the same everywhere, so no choice explains the difference")
            return result
        layers = max(1, *(len(self._sites(unit)) for unit in units))
        runs = estimate((len(units), layers)) + 3
        apiece = "" if self.probes.can_switch else f", {runs * outcome.seconds / 60:.0f} minutes"
        self.say(
            f"{result.candidates[0]} sites of {len(units)} operators and settings differ: about {runs} more runs for "
            f"one culprit{apiece}"
        )
        self._search(units, result)
        if not result.agrees and self.probes.switching:
            result.notes.append("switching a running engine misled the search, so every run starts an engine")
            self.probes.switching = False
            result.blamed.clear()
            self._search(units, result)
        self.probes.stop()
        return result

    def _search(self, units: Sequence[str], result: Result) -> None:
        if self.probes.can_switch:
            control = self._ask("control: the good policy, in this engine", frozenset())
            if control:
                result.notes.append("the engine differs under the good policy too, once the other one ran in it")
                self.probes.switching = False
        found = culprits(units, lambda bad: self._ask(f"operators: {_named(bad, units)}", bad))
        if not found.culprits:
            result.notes.append("the same choices, named one by one, do not differ")
            result.agrees = None
            return
        orders: dict[Site, Branches] = {}
        for culprit in found.culprits:
            result.blamed.append(self._within(culprit, orders))
        result.policy = self._policy(result.blamed, orders)
        outcome, _ = self.probes.ask_started("the policy that avoids it", result.policy)
        result.agrees = outcome.verdict.agrees

    def _within(self, culprit: Culprit[str], orders: dict[Site, Branches]) -> Blamed:
        """Find the layers of an operator, the implementation, and the ranks; add the replacement to ``orders``."""
        op, partners = culprit.unit, frozenset(culprit.partners)
        if op.startswith((SETTING, ATEN)):
            runs = tuple(filter(None, (self.of_bad.aten.get(op),)))
            told = op.startswith(ATEN) and not self.probes.slower_than
            kinds = self.probes.kinds(op, of_choices(*self._chosen(partners | {op}))) if told else ()
            return Blamed(op, implementations=runs, partners=culprit.partners, kinds=tuple(kinds))
        sites = self._sites(op)
        layers = Found(tuple(map(Culprit, sites)))  # if times are judged, one layer's is too small a part
        if len(sites) > 1 and not self.probes.slower_than:
            layers = culprits(
                sites,
                lambda bad: self._ask(f"layers of {op}: {_named(bad, sites)}", partners, dict.fromkeys(bad)),
                sampled=True,
            )
        wrong = {one.unit: self._bad(one.unit) for one in layers.culprits or map(Culprit, sites)}
        suspects = self._suspects(op, wrong)
        if len(suspects) > 1:
            guilty = culprits(suspects, lambda bad: self._ask_implementations(op, suspects, bad, wrong, partners))
            suspects = [one.unit for one in guilty.culprits] or suspects
        for site in wrong:
            orders[site] = without(self._bad(site), suspects, self._good(site))
        ranks = self._ranks(op, wrong, partners)
        where = tuple(sorted(wrong, key=in_order))
        return Blamed(op, where, len(sites), tuple(suspects), culprit.partners, layers.everywhere, ranks)

    def _suspects(self, op: str, wrong: Mapping[Site, Branches]) -> list[str]:
        """Return the implementations that the bad policy runs at some sites, in its order."""
        ordered = list(dict.fromkeys(one for branches in wrong.values() for _, ids in branches for one in ids))
        if self.of_bad.ran is not None and (ran := [one for one in ordered if one in self.of_bad.ran.get(op, ())]):
            return ran
        return list(dict.fromkeys(ids[0] for branches in wrong.values() for _, ids in branches if ids))

    def _ask_implementations(
        self,
        op: str,
        suspects: Sequence[str],
        bad: frozenset[str],
        wrong: Mapping[Site, Branches],
        partners: frozenset[str],
    ) -> bool:
        gone = [one for one in suspects if one not in bad]
        instead = {site: without(branches, gone, self._good(site)) for site, branches in wrong.items()}
        return self._ask(f"implementations of {op}: {_named(bad, suspects)}", partners, instead)

    def _ranks(self, op: str, wrong: Mapping[Site, Branches], partners: frozenset[str]) -> tuple[int, ...]:
        """Return the wrong ranks, if a live engine can have several policies; else nothing."""
        if self.world == 1 or not self.probes.can_switch or self.probes.slower_than:
            return ()
        every = tuple(range(self.world))
        found = culprits(
            every, lambda bad: self._ask(f"ranks with {op}: {_named(bad, every)}", partners, dict(wrong), bad)
        )
        those = tuple(sorted({one.unit for one in found.culprits}))
        return () if len(those) == self.world else those

    # -- questions

    def _units(self) -> list[str]:
        keys = (*OTHER_SETTINGS, BLACKLIST)
        apart = [key for key in keys if key not in self._known and self.good.get(key) != self.bad.get(key)]
        operators = dict.fromkeys(site.op for site in self.candidates)
        return [*operators, *(self.replaced or ()), *(SETTING + key for key in apart)]

    @property
    def _known(self) -> Sequence[str]:
        """Return keys with a known effect: they stay as in the bad policy, and single operators are excluded."""
        return () if self.replaced is None else (*OF_ATEN, BLACKLIST)

    def _sites(self, op: str) -> list[Site]:
        return [site for site in self.candidates if site.op == op]

    def _good(self, site: Site) -> Branches:
        return self.of_good.choice(site) or self.of_bad.at[site]

    def _bad(self, site: Site) -> Branches:
        return self.of_bad.at[site]

    def _ask(
        self,
        what: str,
        units: frozenset[str],
        instead: Mapping[Site, Branches | None] | None = None,
        ranks: frozenset[int] | None = None,
    ) -> bool:
        """Whether the result differs with some operators bad, and further sites with their bad, or another, choice."""
        chosen, base = self._chosen(units, instead)
        there = None
        if ranks is not None:
            there = Ranks(ranks, of_choices({site: self._good(site) for site in self.of_bad.at}, base))
        watched = [site for site in self.candidates if chosen[site]]
        replaced = units & {*(self.replaced or ())}
        return not self.probes.ask(what, chosen, watched, base, there, replaced).verdict.agrees

    def _chosen(
        self, units: frozenset[str], instead: Mapping[Site, Branches | None] | None = None
    ) -> tuple[dict[Site, Branches], Document]:
        """Return the choices of a question, and the document with its other settings."""
        chosen = {site: self._good(site) for site in self.of_bad.at}
        chosen |= {site: self._bad(site) for site in self.candidates if site.op in units}
        chosen |= {site: branches or self._bad(site) for site, branches in (instead or {}).items()}
        for op in {site.op for site in self.candidates}:  # calls by name follow the layers, once all are bad
            own = self._sites(op)
            if Site(op) not in own and all(chosen[site] == self._bad(site) for site in own):
                chosen[Site(op)] = self._bad(Site(op))
        return chosen, self._settings(units)

    def _settings(self, units: frozenset[str]) -> Document:
        """Return the good policy's settings, with those under test from the bad one."""
        base = dict(self.good)
        for key in (*OTHER_SETTINGS, BLACKLIST):
            if SETTING + key in units or key in self._known:
                base.pop(key, None)
                base |= {key: self.bad[key]} if key in self.bad else {}
        return blacklisting(base, {*(self.replaced or ())} - units)

    def _choices_of_bad(self) -> Choices:
        """Return the choices of the bad policy, from an engine that started with the good one.

        Raises:
            DispatchError: the engine cannot answer.
        """
        of_aten = {key: self.bad[key] for key in OF_ATEN if key in self.bad}
        try:
            engine = self.probes.start({**self.good, **of_aten, BLACKLIST: ["*"]}, eager=True)
        except EngineDiedError:  # the backend that replaces them does not even load
            engine = self.probes.start(self.good, eager=True)
        engine.switch(self.bad, None, None)
        chosen = Choices.of(engine.answers()[0])
        self.probes.stop()
        return chosen

    def _policy(self, blamed: Sequence[Blamed], orders: Mapping[Site, Branches]) -> Document:
        spare = set()
        for site, branches in orders.items():
            first = next(iter(branches[-1][1]), "")
            if first.startswith("vendor.") and all(first not in ids for _, ids in self._bad(site)):
                spare.add(first.split(".")[1])
        document = avoiding(self.bad, self.of_bad, orders, spare)
        for one in blamed:
            if one.op.startswith(SETTING):
                key = one.op.removeprefix(SETTING)
                document.pop(key, None)
                document |= {key: self.good[key]} if key in self.good else {}
        return blacklisting(document, {one.op for one in blamed if one.op.startswith(ATEN)})


def _named(bad: frozenset[Any], every: Sequence[Any]) -> str:
    """Return the units of a question in a few words."""
    inside = [unit for unit in every if unit in bad]
    if len(inside) == 1 or (len(inside) <= 3 and len(", ".join(map(str, inside))) < 60):
        return ", ".join(map(str, inside))
    return f"{len(inside)} of {len(every)}, {inside[0]} to {inside[-1]}" if inside else "none"

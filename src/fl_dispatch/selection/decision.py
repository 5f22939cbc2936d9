"""Decide which implementation runs, and why: a pure function of implementations and policy.

The first step sets aside implementations that may not run: vendor allow and deny lists, facts, availability, bans. Then
tokens give the order: the operator's own order; else a tuned order, followed by the default; else the default order of
``prefer``. Within one token higher priority comes first, then the smaller id. A call takes the first candidate that
fits its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from ..ops import Workload
from ..settings.origins import Origin
from ..settings.selection_policy import SelectionPolicy, TunedRule
from ..types import OpImpl, match_token
from .refusals import why_excluded

CHOSEN, FALLBACK, SKIPPED = "chosen", "fallback", "skipped"


@dataclass(frozen=True)
class Considered:
    """One implementation in a decision.

    Args:
        impl: the implementation.
        status: ``chosen``, ``fallback`` (tried if those before it fail) or ``skipped``.
        reason: why, as a message.
        rank: place among the candidates, from 1; ``None`` when skipped.
    """

    impl: OpImpl
    status: str
    reason: str
    rank: int | None = None

    def as_data(self) -> dict[str, Any]:
        """Return this entry as plain data."""
        impl = self.impl
        return {
            "impl_id": impl.impl_id,
            "kind": str(impl.kind),
            "vendor": impl.vendor,
            "priority": impl.effective_priority,
            "rank": self.rank,
            "status": self.status,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        return f"{self.impl.impl_id}: {self.status}, {self.reason}"


@dataclass(frozen=True)
class Branch:
    """The candidates for the calls that a rule admits.

    Args:
        rule: the condition; ``None`` for the branch that takes all other calls.
        candidates: best first.
        order: the tokens, in the order in which they were tried.
        source: the setting that gave the order.
        origin: the origin of that setting.
    """

    rule: TunedRule | None
    candidates: tuple[OpImpl, ...]
    order: tuple[str, ...]
    source: str
    origin: Origin

    def consider(self, refusals: Mapping[OpImpl, str]) -> tuple[Considered, ...]:
        """Return every implementation with its place and reason; ``refusals`` says why others may not run."""
        ranked = [
            Considered(impl, FALLBACK if rank > 1 else CHOSEN, self._why(impl, rank), rank)
            for rank, impl in enumerate(self.candidates, start=1)
        ]
        unnamed = f"not named in the order {', '.join(self.order)} ({self.source}, {self.origin})"
        rest = [
            Considered(impl, SKIPPED, reason or unnamed)
            for impl, reason in refusals.items()
            if impl not in self.candidates
        ]
        return (*ranked, *rest)

    def _why(self, impl: OpImpl, rank: int) -> str:
        if rank == 1:
            return f"first in the order {', '.join(self.order)} that can run ({self.source}, {self.origin})"
        token = next(token for token in self.order if match_token(impl, token))
        return f"number {rank} that can run: '{token}', priority {impl.effective_priority}"


@dataclass(frozen=True)
class Decision:
    """The decision for one operator, with its reasons.

    Args:
        op_name: the operator.
        scope: the layer's scope, or ``None``.
        branches: the candidates by condition; the last branch has no condition.
        refusals: every registered implementation, and why it may not run; empty when it may.
        notes: further remarks on an implementation that may run.
    """

    op_name: str
    scope: str | None
    branches: tuple[Branch, ...]
    refusals: Mapping[OpImpl, str]
    notes: Mapping[OpImpl, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def considered(self) -> tuple[Considered, ...]:
        """Return every registered implementation, candidates first, for a call that meets no rule's condition."""
        return tuple(map(self._with_note, self.branches[-1].consider(self.refusals)))

    def _with_note(self, entry: Considered) -> Considered:
        note = self.notes.get(entry.impl)
        if note is None or entry.status == SKIPPED:
            return entry
        return replace(entry, reason=f"{entry.reason}; {note}")

    def noting(self, remark: Callable[[OpImpl], str]) -> Decision:
        """Return a copy of this decision with a remark on each candidate; ``remark`` returns empty text for none."""
        notes = dict(self.notes)
        for impl in self.candidates:
            if more := remark(impl):
                notes[impl] = "; ".join(filter(None, [notes.get(impl), more]))
        return replace(self, notes=notes)

    @property
    def candidates(self) -> tuple[OpImpl, ...]:
        """Return the implementations that may run, best first, for a call that meets no rule's condition."""
        return self.branches[-1].candidates

    def branches_for(self, tokens: int | None) -> Iterator[Branch]:
        """Return the branches that calls of ``tokens`` tokens may take; all for ``None``."""
        for branch in self.branches:
            if tokens is None or branch.rule is None or branch.rule.admits(tokens):
                yield branch
                if tokens is not None and branch.rule is not None and branch.rule.asks_for_tokens_alone:
                    return

    @property
    def chosen(self) -> OpImpl | None:
        """Return the implementation that runs first."""
        return self.candidates[0] if self.candidates else None

    @property
    def first_choices(self) -> list[OpImpl]:
        """Return the implementations that run first, one for each condition, without repetitions."""
        return list(dict.fromkeys(branch.candidates[0] for branch in self.branches if branch.candidates))

    @property
    def order(self) -> tuple[str, ...]:
        """Return the tokens in the order in which they were tried."""
        return self.branches[-1].order

    @property
    def source(self) -> str:
        """Return the setting that gave the order."""
        return self.branches[-1].source

    @property
    def origin(self) -> Origin:
        """Return the origin of that setting."""
        return self.branches[-1].origin

    @property
    def conditional(self) -> bool:
        """Whether the choice depends on the arguments' dtype, tokens or phase."""
        return len(self.branches) > 1

    def branch_for(self, workload: Workload) -> Branch:
        """Return the branch that a call with this workload takes."""
        return next(branch for branch in self.branches if branch.rule is None or admits(branch.rule, workload))

    def for_call(self, branch: Branch, why_not: Callable[[OpImpl], str]) -> Decision:
        """Return the decision for one call on this branch, without candidates that refuse the call's arguments."""
        refusals = {impl: why_not(impl) for impl in branch.candidates}
        fit = tuple(impl for impl in branch.candidates if not refusals[impl])
        only = replace(branch, rule=None, candidates=fit)
        return replace(self, branches=(only,), refusals={**self.refusals, **refusals})

    def skipped_reasons(self) -> list[str]:
        """Return one line for each implementation that may not run at all."""
        return [str(entry) for entry in self.considered if entry.status == SKIPPED]

    def reasons(self) -> list[str]:
        """Return one line for each implementation."""
        return [str(entry) for entry in self.considered]

    def as_data(self) -> dict[str, Any]:
        """Return the decision as plain data, for programs and other processes."""
        return {
            "operator": self.op_name,
            "scope": self.scope,
            "order": list(self.order),
            "source": self.source,
            "origin": str(self.origin),
            "considered": [entry.as_data() for entry in self.considered],
            "conditional": [
                {"when": condition_of(branch.rule), "candidates": [impl.impl_id for impl in branch.candidates]}
                for branch in self.branches
                if branch.rule is not None
            ],
        }

    def __str__(self) -> str:
        scope = f" in {self.scope}" if self.scope else ""
        head = f"{self.op_name}{scope}: order {', '.join(self.order)} ({self.source}, {self.origin})"
        return "\n".join([head, *(f"  {line}" for line in self.reasons())])


def select(
    op_name: str,
    impls: Sequence[OpImpl],
    policy: SelectionPolicy,
    *,
    scope: str | None = None,
    available: Callable[[OpImpl], tuple[bool, str]] = OpImpl.availability,
    banned: Callable[[OpImpl], str] = lambda impl: "",
    facts: Mapping[str, Any] = MappingProxyType({}),
    notes: Mapping[OpImpl, str] = MappingProxyType({}),
) -> Decision:
    """Rank an operator's implementations under a policy.

    Args:
        op_name: the operator.
        impls: its registered implementations.
        policy: the policy in force.
        scope: the layer's scope.
        available: whether an implementation can run here, and why not.
        banned: why an implementation must not run after failures; empty when it may.
        facts: the host's facts about the process; compared with implementations' requirements.
        notes: further remarks on an implementation that may run; they decide nothing.
    """
    refusals = {impl: why_excluded(op_name, impl, impls, policy, available, facts) or banned(impl) for impl in impls}
    fit = [impl for impl in impls if not refusals[impl]]
    key = policy.per_op_key(op_name, scope)
    if key is not None:
        order = dict(policy.per_op_order)[key]
        own = Branch(None, _rank(fit, order), order, f"order of {key}", policy.origin(f"per_op_order.{key}"))
        return Decision(op_name, scope, (own,), refusals, notes)
    order = tuple(policy.get_default_order())
    branches: list[Branch] = []
    tuned_key = policy.tuned_key(op_name, scope)
    source, origin = f"op_tuned of {tuned_key}", policy.origin(f"op_tuned.{tuned_key}")
    for rule in policy.get_tuned_rules(op_name, scope) if policy.enabled else ():
        if policy.batch_invariant and (rule.tokens is not None or rule.phase is not None):
            continue  # the batch's other rows would decide how a row is computed
        tuned = (*rule.order, *(token for token in order if token not in rule.order))
        condition = None if _is_unconditional(rule) else rule
        branches.append(Branch(condition, _rank(fit, tuned), tuned, source, origin))
        if condition is None:
            break
    if not branches or branches[-1].rule is not None:
        branches.append(Branch(None, _rank(fit, order), order, f"prefer={policy.prefer}", policy.origin("prefer")))
    return Decision(op_name, scope, tuple(branches), refusals, notes)


def admits(rule: TunedRule, workload: Workload) -> bool:
    """Whether a rule's condition holds for a call."""
    if rule.dtype is not None and workload.dtype is not getattr(torch, rule.dtype, None):
        return False
    if rule.phase is not None and workload.phase != rule.phase:
        return False
    return rule.admits(workload.tokens)


def condition_of(rule: TunedRule) -> dict[str, Any]:
    """Return a rule's condition as plain data."""
    return {"dtype": rule.dtype, "tokens": rule.tokens, "phase": rule.phase}


def _is_unconditional(rule: TunedRule) -> bool:
    return not any(value is not None for value in condition_of(rule).values())


def _rank(fit: Iterable[OpImpl], order: Iterable[str]) -> tuple[OpImpl, ...]:
    by_priority = sorted(fit, key=lambda impl: (-impl.effective_priority, impl.impl_id))
    ranked: dict[OpImpl, None] = {}
    for token in order:
        ranked.update(dict.fromkeys(impl for impl in by_priority if match_token(impl, token)))
    return tuple(ranked)

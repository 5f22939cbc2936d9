"""Which implementation runs, and why: a pure function of implementations and policy.

The order: vendor allow and deny lists, availability, then the order of tokens (the operator's own order; else the tuned
one, followed by the default order; else the default order of ``prefer``). Inside one token higher priority comes first,
then the smaller id. The first candidate whose arguments fit is taken at the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from .ops import Workload
from .types import BackendImplKind, OpImpl, match_token

if TYPE_CHECKING:
    from .selection_policy import SelectionPolicy
    from .settings import Origin, TunedRule

CHOSEN, FALLBACK, SKIPPED = "chosen", "fallback", "skipped"
FLAGGEMS_ID = "default.flagos"


@dataclass(frozen=True)
class Considered:
    """One implementation in a decision.

    Args:
        impl: the implementation.
        status: ``chosen``, ``fallback`` (it is tried if those before it fail) or ``skipped``.
        reason: why, in words.
        rank: place among the candidates, from 1; ``None`` when skipped.
    """

    impl: OpImpl
    status: str
    reason: str
    rank: int | None = None

    def as_data(self) -> dict[str, Any]:
        """The same as plain data."""
        impl = self.impl
        return {
            "impl_id": impl.impl_id,
            "kind": str(impl.kind),
            "vendor": impl.vendor,
            "priority": impl.rank,
            "rank": self.rank,
            "status": self.status,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        return f"{self.impl.impl_id}: {self.status}, {self.reason}"


@dataclass(frozen=True)
class Branch:
    """The candidates for calls that a rule admits; ``rule`` is ``None`` for the branch that takes all others."""

    rule: TunedRule | None
    candidates: tuple[OpImpl, ...]


@dataclass(frozen=True)
class Decision:
    """What was decided for one operator, and why.

    Args:
        op_name: the operator.
        scope: the scope that it was decided for, or ``None``.
        order: the tokens in the order they were tried.
        source: which setting gave the order.
        origin: where that setting was made.
        considered: every registered implementation, candidates first.
        branches: the candidates by condition; the last branch has no condition.
    """

    op_name: str
    scope: str | None
    order: tuple[str, ...]
    source: str
    origin: Origin
    considered: tuple[Considered, ...]
    branches: tuple[Branch, ...]

    @property
    def candidates(self) -> tuple[OpImpl, ...]:
        """The implementations that may run, best first, for a call that no condition singles out."""
        return self.branches[-1].candidates

    @property
    def chosen(self) -> OpImpl | None:
        """The implementation that runs first."""
        return self.candidates[0] if self.candidates else None

    @property
    def conditional(self) -> bool:
        """Whether the choice depends on the arguments' dtype, tokens or phase."""
        return len(self.branches) > 1

    def candidates_for(self, workload: Workload) -> tuple[OpImpl, ...]:
        """The candidates for a call with this workload."""
        for branch in self.branches:
            if branch.rule is None or admits(branch.rule, workload):
                return branch.candidates
        raise AssertionError("the last branch has no condition")

    def for_call(self, candidates: Sequence[OpImpl], refusal: Callable[[OpImpl], str]) -> Decision:
        """The decision for one call: these candidates, less those that refuse its arguments."""
        refusals = {impl: refusal(impl) for impl in candidates}
        ranks = {impl: rank for rank, impl in enumerate((impl for impl in candidates if not refusals[impl]), start=1)}
        told = {entry.impl: entry.reason for entry in self.considered}
        fit = [Considered(impl, FALLBACK if rank > 1 else CHOSEN, told[impl], rank) for impl, rank in ranks.items()]
        unfit = [Considered(impl, SKIPPED, reason) for impl, reason in refusals.items() if reason]
        rest = [entry for entry in self.considered if entry.status == SKIPPED]
        return replace(self, considered=(*fit, *unfit, *rest), branches=(Branch(None, tuple(ranks)),))

    def skipped_reasons(self) -> list[str]:
        """One line for each implementation that may not run at all."""
        return [str(entry) for entry in self.considered if entry.status == SKIPPED]

    def reasons(self) -> list[str]:
        """One line for each implementation."""
        return [str(entry) for entry in self.considered]

    def as_data(self) -> dict[str, Any]:
        """The decision as plain data, for programs and other processes."""
        return {
            "operator": self.op_name,
            "scope": self.scope,
            "order": list(self.order),
            "source": self.source,
            "origin": str(self.origin),
            "considered": [entry.as_data() for entry in self.considered],
            "conditional": [
                {"when": _condition(branch.rule), "candidates": [impl.impl_id for impl in branch.candidates]}
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
) -> Decision:
    """Rank an operator's implementations under a policy.

    Args:
        op_name: the operator.
        impls: its registered implementations.
        policy: what is wanted.
        scope: the layer that it is decided for.
        available: whether an implementation can run here, and why not.
        banned: why an implementation must not run after failures; empty when it may.
        facts: what the host stated about the process; compared with what implementations require.
    """
    skipped = {impl: _refusal(op_name, impl, impls, policy, available, facts) or banned(impl) for impl in impls}
    fit = [impl for impl in impls if not skipped[impl]]
    order, source, origin, exclusive = _order(op_name, policy, scope)
    ranked = _rank(fit, order)
    considered = [
        Considered(impl, FALLBACK if rank > 1 else CHOSEN, _why(impl, order, rank, source, origin), rank)
        for rank, impl in enumerate(ranked, start=1)
    ]
    for impl in impls:
        if impl not in ranked:
            reason = skipped[impl] or f"not named in the order {', '.join(order)} ({source}, {origin})"
            considered.append(Considered(impl, SKIPPED, reason))
    branches: list[Branch] = []
    if not exclusive and not policy.reference_only:
        for rule in policy.get_tuned_rules(op_name):
            tuned = (*rule.order, *order)
            branch = Branch(None if _unconditional(rule) else rule, tuple(_rank(fit, tuned)))
            branches.append(branch)
            if branch.rule is None:
                break
    if not branches or branches[-1].rule is not None:
        branches.append(Branch(None, tuple(ranked)))
    elif branches[-1].candidates != tuple(ranked):  # a tuned order for every call
        order, source, origin = (
            (*policy.get_tuned_rules(op_name)[len(branches) - 1].order, *order),
            "op_tuned",
            policy.origin("op_tuned"),
        )
        considered = _reorder(considered, branches[-1].candidates, order, source, origin)
    return Decision(op_name, scope, tuple(order), source, origin, tuple(considered), tuple(branches))


def _condition(rule: TunedRule) -> dict[str, Any]:
    return {"dtype": rule.dtype, "tokens": rule.tokens, "phase": rule.phase}


def admits(rule: TunedRule, workload: Workload) -> bool:
    """Whether a rule's condition holds for a call."""
    if rule.dtype is not None and workload.dtype is not getattr(torch, rule.dtype, None):
        return False
    if rule.phase is not None and workload.phase != rule.phase:
        return False
    if rule.tokens is not None:
        low, high = rule.tokens
        return workload.tokens >= low and (high is None or workload.tokens <= high)
    return True


def _unconditional(rule: TunedRule) -> bool:
    return rule.dtype is None and rule.phase is None and rule.tokens is None


def _refusal(
    op_name: str,
    impl: OpImpl,
    impls: Iterable[OpImpl],
    policy: SelectionPolicy,
    available: Callable[[OpImpl], tuple[bool, str]],
    facts: Mapping[str, Any],
) -> str:
    """Why an implementation may not run at all, or an empty string."""
    kind = impl.kind
    has_reference = any(other.kind is BackendImplKind.REFERENCE for other in impls)
    if policy.reference_only and has_reference and kind is not BackendImplKind.REFERENCE:
        return f"dispatch is switched off, only the reference runs ({policy.origin('reference_only')})"
    if kind is BackendImplKind.VENDOR and impl.vendor is not None and not policy.is_vendor_allowed(impl.vendor):
        if policy.denies_vendor(impl.vendor):
            return f"vendor {impl.vendor} is denied ({policy.origin('deny_vendors')})"
        return f"vendor {impl.vendor} is not among the allowed ones ({policy.origin('allow_vendors')})"
    if impl.impl_id == FLAGGEMS_ID and not policy.is_flaggems_allowed(op_name):
        switch = (
            "use_flaggems"
            if not policy.use_flaggems
            else ("flaggems_allow" if policy.flaggems_allow is not None else "flaggems_deny")
        )
        return f"FlagGems is switched off for it ({policy.origin(switch)})"
    if policy.batch_invariant and not impl.properties.get("batch_invariant"):
        return f"it does not declare batch_invariant ({policy.origin('batch_invariant')})"
    for name, needed in impl.requires.items():
        if name in facts and facts[name] != needed:
            return f"it needs {name}={needed!r}, but here it is {facts[name]!r}"
    is_available, why_not = available(impl)
    return "" if is_available else why_not


def _order(op_name: str, policy: SelectionPolicy, scope: str | None) -> tuple[tuple[str, ...], str, Origin, bool]:
    key = policy.per_op_key(op_name, scope)
    if key is not None:
        order = dict(policy.per_op_order)[key]
        return order, f"order of {key}", policy.origin(f"per_op_order.{key}"), True
    return tuple(policy.get_default_order()), f"prefer={policy.prefer}", policy.origin("prefer"), False


def _rank(fit: Iterable[OpImpl], order: Iterable[str]) -> list[OpImpl]:
    by_priority = sorted(fit, key=lambda impl: (-impl.rank, impl.impl_id))
    ranked: dict[OpImpl, None] = {}
    for token in order:
        ranked.update(dict.fromkeys(impl for impl in by_priority if match_token(impl, token)))
    return list(ranked)


def _why(impl: OpImpl, order: Sequence[str], rank: int, source: str, origin: Origin) -> str:
    token = next(token for token in order if match_token(impl, token))
    if rank == 1:
        return f"first in the order {', '.join(order)} that can run ({source}, {origin})"
    return f"number {rank} that can run: '{token}', priority {impl.rank}"


def _reorder(
    considered: Iterable[Considered],
    candidates: tuple[OpImpl, ...],
    order: tuple[str, ...],
    source: str,
    origin: Origin,
) -> list[Considered]:
    ranked = [
        Considered(impl, FALLBACK if rank > 1 else CHOSEN, _why(impl, order, rank, source, origin), rank)
        for rank, impl in enumerate(candidates, start=1)
    ]
    return ranked + [entry for entry in considered if entry.status == SKIPPED]

"""Winners as the fewest equivalent rules of a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

from ...ops import OPERATORS
from ...settings.selection_policy import TunedRule
from .calls import Key

Rules = tuple[TunedRule, ...]
Group = tuple[str, str, str | None]
"""Operator, dtype and phase: sizes of one group follow each other."""
Bounded = Mapping[Group, tuple[str, ...]]
"""Groups with a largest size for their winner → the order of the rule above it, empty for none."""
NOWHERE: Bounded = MappingProxyType({})


def group_of(key: Key) -> Group:
    """Return the group of a key."""
    return key.op_name, key.dtype, key.phase


def merge(winners: Mapping[Key, str], base: Mapping[str, Rules], bounded: Bounded = NOWHERE) -> dict[str, Rules]:
    """Return operator → its rules, first match first.

    A size between two measured ones is padded to the larger one's graph, so it gets that one's rule; sizes above the
    largest get the largest's, unless the group is bounded. A condition is omitted if all winners agree, because then
    the choice can be compiled into a model. The last rule of an operator has no condition if the operator has a winner
    everywhere. Otherwise the operator's rules of ``base`` hold for keys without a winner, and where no condition fits.

    Args:
        winners: key → implementation, empty where no candidate may win.
        base: rules without tuning. Operators that were not tuned keep them.
        bounded: groups with another order above the largest size; the rules of ``base``, or the default order, where it
            is empty.
    """
    found = dict(base)
    for op_name in dict.fromkeys(key.op_name for key in winners):
        mine = {key: winner for key, winner in winners.items() if key.op_name == op_name}
        own = _of_operator(mine, bounded)
        if not any(group_of(key) in bounded for key in mine) and _covers_everything(op_name, mine):
            own = (*own[:-1], TunedRule(order=own[-1].order))
        else:
            own = (*own, *(rule for rule in base.get(op_name, ()) if rule not in own))
        if own:
            found[op_name] = own
    return found


def _covers_everything(op_name: str, winners: Mapping[Key, str]) -> bool:
    """Whether there is a winner for every call, so that the last rule needs no condition."""
    phases = {key.phase for key in winners}
    dtypes = {key.dtype for key in winners}
    needed = {"prefill", "decode"} if op_name in OPERATORS and OPERATORS[op_name].phases else {None}
    return phases >= needed and all(winners.values()) and (len(dtypes) == 1 or len(_of_operator(winners, NOWHERE)) == 1)


def _of_operator(winners: Mapping[Key, str], bounded: Bounded) -> Rules:
    everybody = set(winners.values())
    if len(everybody) == 1 and "" not in everybody and not any(group_of(key) in bounded for key in winners):
        return (TunedRule(order=(f"impl:{everybody.pop()}",)),)
    dtypes = list(dict.fromkeys(key.dtype for key in winners))
    of_dtype = [
        _of_dtype({key: one for key, one in winners.items() if key.dtype == dtype}, bounded) for dtype in dtypes
    ]
    if all(rules == of_dtype[0] for rules in of_dtype):
        return of_dtype[0]
    return tuple(replace(rule, dtype=dtype) for dtype, rules in zip(dtypes, of_dtype, strict=True) for rule in rules)


def _of_dtype(winners: Mapping[Key, str], bounded: Bounded) -> Rules:
    """Return rules of one operator and dtype."""
    rules: list[TunedRule] = []
    for phase in dict.fromkeys(key.phase for key in winners):
        own = {key: winner for key, winner in winners.items() if key.phase == phase}
        sizes = sorted((key.tokens, winner) for key, winner in own.items())
        ends = bounded.get(group_of(next(iter(own))))
        rules += [replace(rule, phase=phase) for rule in _of_sizes(sizes, ends)]
    return tuple(rules)


def _of_sizes(sizes: Sequence[tuple[int, str]], ends: tuple[str, ...] | None) -> list[TunedRule]:
    """Return rules by numbers of tokens, in ascending order; none for sizes without a winner.

    Args:
        sizes: tokens and winners.
        ends: the order above the largest size, where the last rule ends; ``None`` if that rule has no end.
    """
    rules, low = [], 0
    runs = [(winner, [tokens for tokens, _ in run]) for winner, run in groupby(sizes, key=lambda size: size[1])]
    for index, (winner, run) in enumerate(runs):
        high = None if index == len(runs) - 1 and ends is None else run[-1]
        if winner:
            tokens = None if len(runs) == 1 and ends is None else (low, high)
            rules.append(TunedRule(order=(f"impl:{winner}",), tokens=tokens))
        low = run[-1] + 1
    if ends:
        rules.append(TunedRule(order=ends, tokens=(low, None)))
    return rules


def agreement(one: Mapping[Key, str], other: Mapping[Key, str]) -> tuple[float, dict[Key, tuple[str, str]]]:
    """Compare two tunings: the share of their common keys with equal winners, and the keys with different ones."""
    both = [key for key in one if key in other]
    differ = {key: (one[key], other[key]) for key in both if one[key] != other[key]}
    return (1 - len(differ) / len(both) if both else 0.0), differ

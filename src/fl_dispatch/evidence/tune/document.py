"""A tuning as a platform's file that people read and commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...settings.place import shorten
from ...settings.selection_policy import TunedRule
from .calls import Key
from .choice import Choice, Figure
from .rules import Rules

WIDTH = 116


def platform_file(
    title: Sequence[str],
    base: Mapping[str, Any],
    rules: Mapping[str, Rules],
    figures: Mapping[Key, Sequence[Figure]],
    choices: Mapping[Key, Choice],
    served: Callable[[Key, str], str] = lambda key, impl_id: "",
) -> str:
    """Write a platform file as YAML text.

    Args:
        title: lines of the comment at its beginning.
        base: the keys of the file that it starts from, without ``op_tuned``.
        rules: operator → its rules, including those of the base file.
        figures, choices: the measurements and their winners, for the comments.
        served: returns the other sizes at which a key's winner was proven, in words.
    """
    lines = [f"# {line}" for line in title] + [""]
    lines += [f"{key}: {_scalar(value)}" for key, value in base.items()]
    lines.append("op_tuned:")
    for op_name, own in rules.items():
        keys = [key for key in choices if key.op_name == op_name]
        for key in keys:
            lines.append(f"  # {_comment(key, figures[key], choices[key])}")
            lines += [f"  #   {words}" for words in filter(None, [served(key, choices[key].impl_id)])]
        lines += [f"  # {line}" for line in _excluded([figures[key] for key in keys])]
        if not keys:
            lines.append("  # Not tuned: as in the file that this one starts from.")
        lines.append(f"  {op_name}:")
        lines += [f"    - {{{_rule(rule)}}}" for rule in own]
    return "\n".join(lines) + "\n"


def _comment(key: Key, figures: Sequence[Figure], choice: Choice) -> str:
    """Return the winner of a key and the fastest eligible other candidate, with their times in a step."""
    size = f"{key.tokens} token{'s' * (key.tokens != 1)}" + (f", {key.phase}" if key.phase else "")
    told = {figure.impl_id: figure for figure in figures if figure.seconds and not figure.problem}
    if choice.impl_id not in told:
        return f"{size}: no candidate may win"
    others = sorted((one for name, one in told.items() if name != choice.impl_id), key=lambda figure: figure.median)
    return f"{size}: " + "; then ".join(f"{one.impl_id} {_time(one)}" for one in (told[choice.impl_id], *others[:1]))


def _time(figure: Figure) -> str:
    low, high = figure.bounds
    return f"{microseconds(figure.median)} us [{microseconds(low)}, {microseconds(high)}]"


def microseconds(seconds: float) -> str:
    """Return a time with four significant digits, without an exponent."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _excluded(figures: Sequence[Sequence[Figure]]) -> list[str]:
    """Return one line for each candidate that may not win at some size, with its first reason."""
    reasons: dict[str, str] = {}
    for figure in (figure for key in figures for figure in key if figure.problem):
        reasons.setdefault(figure.impl_id, figure.problem)
    return [shorten(f"{impl_id} may not win: {why}", WIDTH) for impl_id, why in reasons.items()]


def _rule(rule: TunedRule) -> str:
    conditions = {"dtype": rule.dtype, "phase": rule.phase}
    when = [f"{name}: {value}" for name, value in conditions.items() if value is not None]
    if rule.tokens is not None:
        low, high = rule.tokens
        when.append(f"tokens: [{low}, {'null' if high is None else high}]")
    order = ", ".join(f'"{token}"' if ":" in token else token for token in rule.order)
    return (f"when: {{{', '.join(when)}}}, " if when else "") + f"order: [{order}]"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    return str(value)

"""A tuning as a platform's file that people read and commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
) -> str:
    """The text of a YAML file.

    Args:
        title: lines of the comment that it begins with.
        base: the keys of the file that it starts from, but for ``op_tuned``.
        rules: operator → its rules, those of the base file included.
        figures, choices: what was measured, for the comments.
    """
    lines = [f"# {line}" for line in title] + [""]
    lines += [f"{key}: {_scalar(value)}" for key, value in base.items()]
    lines.append("op_tuned:")
    for op_name, own in rules.items():
        keys = [key for key in choices if key.op_name == op_name]
        lines += [f"  # {line}" for key in keys for line in _comment(key, figures[key], choices[key])]
        if not keys:
            lines.append("  # Not tuned: as in the file that this one starts from.")
        lines.append(f"  {op_name}:")
        lines += [f"    - {{{_rule(rule)}}}" for rule in own]
    return "\n".join(lines) + "\n"


def _comment(key: Key, figures: Sequence[Figure], choice: Choice) -> list[str]:
    """One line: the key's winner and the time of each candidate in a step."""
    told = []
    for figure in figures:
        if figure.seconds:
            low, high = figure.bounds
            mark = f", {figure.problem.partition(':')[0]}" if figure.problem else ""
            told.append(f"{figure.impl_id} {figure.median * 1e6:.4g} [{low * 1e6:.4g}, {high * 1e6:.4g}]{mark}")
        else:
            told.append(f"{figure.impl_id}: {figure.problem.partition(':')[0] or 'not timed'}")
    phase = f", {key.phase}" if key.phase else ""
    return [f"{key.tokens} tokens{phase}: {choice.impl_id or 'nobody'}; us a step: {'; '.join(told)}"]


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

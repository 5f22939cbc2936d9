"""A checkpoint's names of a layer: of the parts that a host joins into it, and below the modules around its blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

PARTS: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Joined layers with the same names in many models → a checkpoint's names of their parts."""
ROOTS = r"(?:(?:model|language_model)\.)*"
"""An expression for the modules around a model's blocks, which checkpoints and hosts nest in different orders."""


def below_roots(name: str) -> str:
    """Return a layer's name without the modules around the model's blocks."""
    return re.sub(f"^{ROOTS}", "", name)


def names_of_parts(prefix: str, mapping: Mapping[str, object]) -> list[str]:
    """Return a checkpoint's names of the layers that a host joins into one; empty for other layers.

    Args:
        prefix: the layer's prefix.
        mapping: the model's table of joined layers, which takes precedence over :data:`PARTS`.
    """
    above, dot, name = prefix.rpartition(".")
    found = mapping.get(name)
    parts = found if isinstance(found, (list, tuple)) else PARTS.get(name, ())
    return [f"{above}{dot}{part}" for part in parts]


def agreed(
    rule: Callable[[str], T | None],
    prefix: str,
    parts: Sequence[str],
    usual: T,
    refused: Callable[[str], Exception],
) -> T:
    """Return the answer of a checkpoint's rules for a layer, joined or not.

    A rule that names no part may name the joined layer, as in a checkpoint with joined layers.

    Args:
        rule: a layer's name → the checkpoint's answer for that name; ``None`` if it has none.
        prefix: the layer's prefix.
        parts: see :func:`names_of_parts`.
        usual: the answer for names without one.
        refused: the unsupported feature → the error, raised if the parts differ.
    """
    found = [rule(name) for name in parts]
    if all(answer is None for answer in found):
        return usual if (own := rule(prefix)) is None else own
    answers = [usual if answer is None else answer for answer in found]
    check_equal(prefix, parts, answers, refused)
    return answers[0]


def check_equal(
    prefix: str,
    parts: Sequence[str],
    answers: Sequence[T],
    refused: Callable[[str], Exception],
) -> None:
    """Raise by ``refused`` if the answers for the parts of a layer differ; parameters as in :func:`agreed`."""
    if all(answer == answers[0] for answer in answers):
        return
    named = ", ".join(f"{name.rpartition('.')[2]} {said}" for name, said in zip(parts, answers, strict=True))
    raise refused(f"one layer with parts that the checkpoint quantizes in different ways ({named}; {prefix})")

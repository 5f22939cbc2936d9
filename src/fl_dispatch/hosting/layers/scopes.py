"""The scopes of layers, and rules of a policy for single layers, if a host lets layers share a module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...policy import get_policy


def prefixes_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module of a model with its prefixes: several if layers share it."""
    found: dict[nn.Module, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(prefix)
    return found


def refuse_partial_rules(op_name: str, shared: Sequence[str]) -> None:
    """Refuse rules for some of the layers that share a module, such as one rotary embedding for all layers.

    Args:
        op_name: the operator that the module runs.
        shared: the prefixes of all layers that share the module.

    Raises:
        ValueError: a rule names some of them.
    """
    policy = get_policy()
    for name, rules in (("per_op_order", policy.get_per_op_order), ("op_tuned", policy.get_tuned_rules)):
        if len({str(rules(op_name, prefix)) for prefix in shared}) > 1:
            raise ValueError(
                f"{policy.origin(name)}: a rule for '{op_name}' names some of the layers that share one module here "
                f"({', '.join(shared[:3])}, ...: {len(shared)} in all); name all of them, or none"
            )

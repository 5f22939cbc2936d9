"""Find rules of a policy that can have no effect: at start, and once a host has bound its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import ConfigError
from ..logger_manager import get_logger
from ..ops import OPERATORS
from ..settings.selection_policy import SelectionPolicy, fits_scope
from ..state import State

logger = get_logger(__name__)

EXAMPLES = 2
"""Number of layers that a warning names."""


def check(state: State, policy: SelectionPolicy) -> None:
    """Check that every rule can have an effect; log an order of an unregistered operator.

    Raises:
        ConfigError: an order leaves nothing to run, or a rule can never hold.
    """
    for key, order in policy.per_op_order:
        op_name = key.partition("@")[0]
        origin = policy.origin(f"per_op_order.{key}")
        if not state.registry.get_implementations(op_name):
            logger.warning("The order of '%s' (%s) has no effect: no backend registered it", op_name, origin)
            continue
        decision = state.decide(op_name, None, replace(policy, per_op_order=((op_name, order),)))
        if not decision.candidates:
            why = "; ".join(decision.reasons())
            raise ConfigError(str(origin), key, f"the order {', '.join(order)} leaves nothing to run: {why}")
    for key, tuned in policy.op_tuned:
        operator = OPERATORS.get(key.partition("@")[0])
        if operator is not None and not operator.phases and any(rule.phase for rule in tuned):
            problem = f"'{operator.name}' cannot tell prefill from decode, so a rule with 'phase' never holds"
            raise ConfigError(str(policy.origin(f"op_tuned.{key}")), key, problem)


def unmatched_scopes(state: State, policy: SelectionPolicy) -> dict[str, list[str]]:
    """Return the policy's layer patterns that fit no bound layer, each with example layers of the operator."""
    found: dict[str, list[str]] = {}
    for key, _ in (*policy.per_op_order, *policy.op_tuned):
        op_name, at, pattern = key.partition("@")
        scopes = state.scopes.get(op_name, set())
        if at and not any(fits_scope(pattern, scope) for scope in scopes):
            found[key] = sorted(filter(None, scopes))[:EXAMPLES]
    return found


def warn_of_unmatched_scopes(*processes: Mapping[str, list[str]]) -> None:
    """Log each layer pattern that fits no layer in any process; ``processes`` are their :func:`unmatched_scopes`."""
    first, *others = processes
    for key in first:
        if all(key in other for other in others):
            examples = [scope for process in processes for scope in process[key]][:EXAMPLES]
            logger.warning(
                "'%s' fits no layer; layers of '%s' are, for example: %s",
                key,
                key.partition("@")[0],
                ", ".join(examples) or "none",
            )

"""Rules of a policy that can have no effect: found at start, and once a host has bound its layers."""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from typing import TYPE_CHECKING

from .errors import ConfigError
from .logger_manager import get_logger
from .ops import OPERATORS

if TYPE_CHECKING:
    from .op_manager import OpManager
    from .selection_policy import SelectionPolicy

logger = get_logger(__name__)


def check(manager: OpManager, policy: SelectionPolicy) -> None:
    """Whether every rule can have an effect; an order of an operator that nobody registered is told.

    Raises:
        ConfigError: an order leaves nothing to run, or a rule can never hold.
    """
    for key, order in policy.per_op_order:
        op_name = key.partition("@")[0]
        origin = policy.origin(f"per_op_order.{key}")
        if not manager.registry.get_implementations(op_name):
            logger.warning("The order of '%s' (%s) has no effect: nobody registered it", op_name, origin)
            continue
        decision = manager.decide(op_name, None, replace(policy, per_op_order=((op_name, order),)))
        if not decision.candidates:
            why = "; ".join(decision.reasons())
            raise ConfigError(str(origin), key, f"the order {', '.join(order)} leaves nothing to run: {why}")
    for key, tuned in policy.op_tuned:
        operator = OPERATORS.get(key.partition("@")[0])
        if operator is not None and not operator.phases and any(rule.phase for rule in tuned):
            problem = f"'{operator.name}' cannot tell prefill from decode, so a rule with 'phase' never holds"
            raise ConfigError(str(policy.origin("op_tuned")), key, problem)


def warn_of_unmatched_scopes(manager: OpManager, policy: SelectionPolicy) -> None:
    """Log each layer pattern of the policy that fits no layer that was bound."""
    for key, _ in (*policy.per_op_order, *policy.op_tuned):
        op_name, at, pattern = key.partition("@")
        scopes = manager.tables.scopes(op_name)
        if at and not any(fnmatch.fnmatchcase(scope, pattern) for scope in scopes):
            examples = ", ".join(sorted(filter(None, scopes))[:2]) or "none"
            logger.warning("'%s' fits no layer; layers of '%s' are, for example: %s", key, op_name, examples)

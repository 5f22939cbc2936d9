"""Code for an engine's processes: report the choices in force, switch the policy, and perturb results at random.

The hosts' hooks into these processes are in :mod:`fl_dispatch.cli.bisect.engine_hooks`; this module knows no host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from ...aten_replacement import apply_blacklist, kept_operators, replaced_operators, replacements
from ...devices import detect_device
from ...errors import DispatchFrozenError
from ...manager import get_default_manager
from ...ops import OPERATORS
from ...policy import set_global_policy
from ...selection.decision import condition_of
from ...settings import Settings
from ...types import BackendImplKind, OpImpl
from .kinds import end_watch

if TYPE_CHECKING:
    from torch import nn

MOVED = "moved"
"""The vendor of implementations with perturbed results."""
PART = 0.5
"""The largest perturbation of results, as a part of the relative error that a declaration accepts."""


def moved_id(impl_id: str) -> str:
    """Return the id of an implementation's copy that perturbs its results."""
    return f"vendor.{MOVED}.{impl_id}"


def sites(model: nn.Module | None) -> list[dict[str, Any]]:
    """Return every operator and bound layer of this process, with the implementations that may run there.

    Each is ``op``, ``scope`` (``None`` for calls by name), ``also`` (other prefixes of the same module), and
    ``branches``: pairs of a condition (or ``None``) and the ids of the candidates, best first.
    """
    manager = get_default_manager()
    manager.ensure_initialized()
    shared = {} if model is None else _shared(model)
    found = []
    for op_name in manager.registry.list_operators():
        manager.explain(op_name)  # fills the table
    for key, plan in list(manager.table_keeper.root.plans.items()):
        if plan.scope is None and key != plan.op_name:
            continue  # the same choice for another form of call
        branches = [
            (None if branch.rule is None else condition_of(branch.rule), [impl.impl_id for impl in branch.candidates])
            for branch in plan.decision.branches
        ]
        also = [prefix for prefix in shared.get(plan.scope or "", ()) if prefix != plan.scope]
        found.append({"op": plan.op_name, "scope": plan.scope, "also": also, "branches": branches})
    return found


def _shared(model: nn.Module) -> dict[str, list[str]]:
    """Return prefix → all prefixes of that module, if layers share one."""
    groups: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        groups.setdefault(id(module), []).append(prefix)
    return {prefix: group for group in groups.values() if len(group) > 1 for prefix in group}


def switch(settings: str, seed: int | None = None) -> str:
    """Switch this process to other settings, as far as possible now: the policy, and the operators left to PyTorch.

    Bound layers follow at their next call.

    Args:
        settings: settings as JSON.
        seed: seed of the perturbations of implementations' copies (:func:`moved_id`).

    Returns:
        Why the policy cannot apply because choices are frozen for compiled code or graphs; otherwise empty.
    """
    manager = get_default_manager()
    manager.ensure_initialized()
    try:
        if seed is not None:
            _Moves.start(seed)
        wanted = Settings.from_json(settings)
        set_global_policy(wanted.policy)
        apply_blacklist(wanted.aten_blacklist)
        manager.set_counting(True)
        manager.reset_counts()
    except DispatchFrozenError as error:
        return str(error)
    return "dispatch is frozen, so that not all calls are seen to change" if manager.frozen else ""


def answer(model: nn.Module | None) -> dict[str, Any]:
    """The choices in force in this process, and the implementations that ran since the last change, as plain data."""
    manager = get_default_manager()
    return {
        "sites": sites(model),
        "frozen": manager.frozen,
        "counts": [[op, impl_id, calls] for (op, impl_id), calls in sorted(manager.call_counts().items()) if calls],
        "failed": {op: sorted(ids) for op, ids in manager.get_failed_impls().items()},
        "aten": {
            "replaced": dict(replaced_operators()),
            "called": _called(),
            "kept": kept_operators(),
            "kinds": end_watch(),
        },
    }


def processor_seconds() -> float | None:
    """Return this process's processor time, or ``None`` if an accelerator computes."""
    return None if detect_device().accelerator else time.process_time()


def _called() -> list[str]:
    reports = (found.report() for found in replacements())
    return sorted(f"aten::{key}" for report in reports for key, calls in report["calls"].items() if calls)


class _Moves:
    """Random perturbations of results, the same in every rank for the same calls."""

    generators: dict[torch.device, torch.Generator] = {}  # noqa: RUF012  # one for each device of this process
    seed = 0

    @classmethod
    def start(cls, seed: int) -> None:
        """Begin with a seed; the first time, register a copy of every implementation."""
        cls.seed = seed
        cls.generators.clear()
        registry = get_default_manager().registry
        for op_name in registry.list_operators():
            operator = OPERATORS.get(op_name)
            if operator is None or operator.selection:
                continue
            own = registry.get_implementations(op_name)
            present = {impl.impl_id for impl in own}
            registry.register_many(
                _copy(impl) for impl in own if impl.vendor != MOVED and moved_id(impl.impl_id) not in present
            )

    @classmethod
    def move(cls, op_name: str, result: Any) -> None:
        """Add noise to a result in place: each element moves by at most a part of its declared tolerance.

        The tolerance is relative to the element's size or its row's root mean square, whichever is larger.
        """
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            if (accepted := OPERATORS[op_name].tolerances.get(tensor.dtype)) is None:
                continue
            if (generator := cls.generators.get(tensor.device)) is None:
                generator = cls.generators[tensor.device] = torch.Generator(tensor.device).manual_seed(cls.seed)
            values = tensor.float()
            scale = values.abs().maximum(values.square().mean(-1, keepdim=True).sqrt())
            random = torch.rand(values.shape, generator=generator, device=tensor.device).mul_(2).sub_(1)
            tensor.copy_(values.addcmul_(random, scale, value=PART * accepted.rtol))


def _copy(impl: OpImpl) -> OpImpl:
    """Copy an implementation, and perturb the copy's results."""
    fn: Callable[..., Any] = impl.fn

    @wraps(fn)
    def moved(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        _Moves.move(impl.op_name, result)
        return result

    available = impl.is_available
    return replace(
        impl,
        impl_id=moved_id(impl.impl_id),
        fn=moved,
        kind=BackendImplKind.VENDOR,
        vendor=MOVED,
        available=available,
        opaque=True,
    )

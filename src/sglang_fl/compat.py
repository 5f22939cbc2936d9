"""Every place where SGLang is hooked or extended at run time, and every difference between its versions.

Nothing else in this package replaces SGLang's attributes. :func:`all_hooks` lists the hooks with their reasons;
:func:`refuse_unhooked` refuses to serve where SGLang did not apply one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fl_dispatch.logger_manager import get_logger

from .config import ATTENTION
from .hooks import Hook, unapplied

logger = get_logger(__name__)

TESTED_HOSTS = ("0.5.21",)
"""All tests run on these. What is known of others, from their source alone: up to 0.5.16 layers choose their forward
when they are made, in ``MultiPlatformOp.dispatch_forward`` (0.5.20 made them ``BaseFusedOp``); 0.5.23 has no such
method, asks the platform for ``capabilities`` and ``get_kv_pool_cls(kind=)``, and needs no hook on ``support_triton``.
"""

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
FUSED_OP = "sglang.kernels.fused_op.BaseFusedOp"
OLDER_OP = "sglang.srt.layers.utils.multi_platform.MultiPlatformOp"


def host_version() -> str:
    """SGLang's version."""
    from importlib.metadata import version

    return version("sglang")


@cache
def warn_of_untested_host() -> None:
    """One WARNING on an SGLang that the tests did not run on."""
    if host_version() not in TESTED_HOSTS:
        logger.warning("SGLang %s is not a tested version (tested: %s)", host_version(), ", ".join(TESTED_HOSTS))


def _never_triton(original: Any, backend: str) -> bool:
    return False if backend == ATTENTION else bool(original(backend))


def _last_locations(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


def _cap_logits(original: Any, logits: Any, cap: float) -> Any:
    return logits.div_(cap).tanh_().mul_(cap) if logits.is_cpu else original(logits, cap)


def dispatch_target() -> str:
    """What this version's layers call to choose their forward."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.layernorm import RMSNorm

    return f"{FUSED_OP}._resolve_forward_method" if issubclass(RMSNorm, BaseFusedOp) else f"{OLDER_OP}.dispatch_forward"


@cache
def all_hooks() -> tuple[Hook, ...]:
    """Every hook of this package."""
    from . import distributed, layers, runner

    return (
        Hook(dispatch_target(), layers.resolve, "around", "layers would run SGLang's own code"),
        Hook(f"{RUNNER}.load_model", runner.load_model, "around", "layers would not know their prefix"),
        Hook(f"{RUNNER}.forward", runner.forward, "around", "nobody would see that an operator is never dispatched"),
        Hook(
            "sglang.srt.utils.common.support_triton",
            _never_triton,
            "around",
            "SGLang starts Triton kernels for every attention backend that it does not know; 0.5.23 asks the platform",
        ),
        Hook(
            "sglang.srt.mem_cache.allocation.get_last_loc",
            _last_locations,
            "replace",
            "SGLang starts a Triton kernel for every attention backend that it does not know",
        ),
        Hook(
            "sglang.srt.layers.logits_processor.fused_softcap",
            _cap_logits,
            "around",
            "SGLang starts a Triton kernel for the logits of models with a soft cap",
        ),
        *distributed.HOOKS,
    )


def extend_host() -> None:
    """Add what SGLang has a place for: our attention backend, and methods that ``Engine.collective_rpc`` can call."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    from . import attention, report

    register_attention_backend(ATTENTION)(attention.create)
    AttentionBackendRegistry.register(ATTENTION, attention.absorb_always)
    add_attention_backend_choices([ATTENTION])
    for method in report.SCHEDULER_METHODS:
        setattr(Scheduler, method.__name__, method)


def refuse_unhooked() -> None:
    """Raise ``RuntimeError`` if SGLang did not apply a hook: it logs that and would go on without it."""
    missing = unapplied(all_hooks())
    if len(missing) == len(all_hooks()):
        raise RuntimeError(
            f"SGLang {host_version()} runs the platform of sglang_fl and did not apply any of its hooks: "
            "SGLANG_PLUGINS must contain 'fl' if it is set"
        )
    if missing:
        named = "; ".join(f"{hook.target} ({hook.reason})" for hook in missing)
        raise RuntimeError(f"SGLang {host_version()} did not apply hooks of sglang_fl: {named}. SGLang's log says why")

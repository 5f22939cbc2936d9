"""Check that a checkpoint's tensors and the model's parameters match, except for leftovers that vLLM allows.

:mod:`vllm_fl.compat.loaders` keeps account while weights load. Parameters that no tensor fills are refused at once.
Tensors that no parameter takes are refused when all ranks have loaded, because each rank takes those of its stage and
its experts.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from fl_dispatch.hosting.loading import allowed as rules
from fl_dispatch.hosting.loading import files, refusals
from fl_dispatch.hosting.loading.account import Account
from fl_dispatch.hosting.loading.allowed import Allowed
from fl_dispatch.hosting.ranks import agreement

UNFILLED = (
    Allowed(r".*\._?(q|k|v|prob)_scale", "scales of a KV cache are 1 where a checkpoint has none, and vLLM says so"),
    Allowed(r".*\.(q|k|v)_zero_point", "vLLM's attention makes them, and none is served"),
    Allowed(r".*\.w(13|2)_bias", "vLLM drops the biases of quantized experts where no expert has one"),
)
"""Parameters and buffers of vLLM's models that a checkpoint may lack."""
UNTAKEN = (
    *rules.UNTAKEN,
    Allowed(r".*\.(q|prob)_scale", "queries are quantized where a kernel asks for it, which ours do not"),
)
"""Tensors of a checkpoint that vLLM's models may ignore."""

_loaded: list[Account] = []
"""The accounts of this process's served models, until all ranks have loaded."""


def open_account(model: nn.Module, model_config: Any) -> Account | None:
    """Open the account of a load; return ``None`` if vLLM quantizes weights while it loads them."""
    from vllm.model_executor.model_loader.base_loader import _has_online_quant

    if _has_online_quant(model):
        return None
    return Account(model, str(model_config.model), model_config.quantization is not None)


def close_account(account: Account, model: nn.Module, model_config: Any) -> None:
    """Refuse parameters that the checkpoint did not fill, and keep the account until all ranks have loaded.

    Raises:
        CheckpointError: a parameter is not filled, or a tensor has another kind of numbers.
    """
    drafts = model_config.runner_type == "draft"
    refusals.refuse_unfilled(account, model, (*UNFILLED, *(rules.OF_TARGET if drafts else ())))
    files.warn_of_unread(account.files)
    if not drafts:
        _loaded.append(account)


def refuse_left(model_config: Any, all_ranks: ProcessGroup) -> None:
    """Refuse tensors of the checkpoint that no rank took. Every rank must call it after its models are loaded.

    Pooling models take the layers of their task, and draft models take their layers from the target's checkpoint.

    Raises:
        CheckpointError: there are such tensors.
    """
    accounts, _loaded[:] = list(_loaded), []
    for account in accounts:
        pools = model_config.runner_type == "pooling"
        left = [] if pools else refusals.left_over(account, UNTAKEN, model_config)
        refusals.refuse_left(account, agreement.on_all(all_ranks, left))

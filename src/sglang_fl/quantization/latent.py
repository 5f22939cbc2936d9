"""Latent attention of quantized models: the weight of ``kv_b_proj``, dequantized once for the absorbed form.

That form multiplies queries and results with the weight. SGLang splits the weight as soon as a checkpoint is read, with
code for its own kernels' formats. Here it is split when the layers are in our form, by a product with ones, which every
kind of weights can compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fl_dispatch.hosting.layers.layer_kernels import kernels
from fl_dispatch.hosting.quantized.layers import QuantizedLayer

from . import refused

if TYPE_CHECKING:
    from .layers import Layer

WEIGHT = "kv_b_proj"
"""SGLang's name of the layer with the weight to split."""
JOINED = "fused_qkv_a_proj_with_mqa"
"""SGLang's name of the layer that its loader joins from two."""


def refusal(scheme: Layer, name: str) -> str:
    """Return why a layer with this name cannot have these weights; empty if it can."""
    if name in (WEIGHT, JOINED) and scheme.fl_given:
        return "latent attention with scales for inputs in the checkpoint"
    if name == JOINED and not scheme.fl_joins:
        return "latent attention with compressed queries and weights that SGLang's loader cannot join"
    return ""


def _scheme(layer: Any) -> Any:
    return getattr(layer.quant_method, "scheme", None)


def split_plain(
    original: Callable[..., None], model: Any, is_nextn: bool = False, weight_names: Iterable[str] | None = None
) -> None:
    """Call SGLang's splitting only for layers with a plain weight."""
    found = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] == WEIGHT}
    ours = {name for name, module in found.items() if isinstance(_scheme(module), QuantizedLayer)}
    if not ours:
        original(model, is_nextn=is_nextn, weight_names=weight_names)
    elif not is_nextn:
        names = [f"{name}.weight" for name in found] if weight_names is None else weight_names
        original(model, weight_names=[name for name in names if name.rpartition(".")[0] not in ours])


def names_of_predictor(predictor: type[nn.Module], config: Any) -> Any:
    """Return how names of a predictor's layer in a checkpoint become SGLang's, for its lists of plain layers."""
    from sglang.srt.models.utils import WeightsMapper

    return WeightsMapper(orig_to_new_substr={f"model.layers.{config.num_hidden_layers}": "model.decoder"})


def split(model: nn.Module) -> None:
    """Give each latent-attention layer the two parts of its quantized weight, in the model's dtype."""
    for prefix, layer, kernel in kernels(model):
        above, _, name = prefix.rpartition(".")
        if name not in (WEIGHT, JOINED) or not isinstance(kernel, QuantizedLayer):
            continue
        attention: Any = model.get_submodule(above)
        if name == JOINED:
            block, rank = getattr(kernel, "fl_block", 0), attention.q_lora_rank
            if block and rank % block:
                what = f"latent attention with compressed queries of {rank} elements, no whole blocks of {block}"
                raise refused(f"{what} ({prefix})")
            attention._use_min_latency_fused_a_gemm = False  # otherwise SGLang reads a weight that packed layers lack
            continue
        dtype, device = attention.kv_b_proj.params_dtype, next(layer.parameters()).device
        ones = torch.eye(attention.kv_lora_rank, dtype=dtype, device=device)
        with kernel.fl_exact():
            weight = kernel.apply_weights(layer, ones).t()
        sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
        key, value = weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        attention.w_kc = key.transpose(1, 2).contiguous().transpose(1, 2)
        attention.w_vc = value.contiguous().transpose(1, 2)

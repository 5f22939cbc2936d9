"""Steps of one token: which products are fused with the norm before and the gate after them, decided at the start.

Such a step is bound by memory traffic, and by small kernels between the products. The range of exactly one token is
compiled separately, and all other graphs stay unchanged. :mod:`.one_token_graph` changes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node

from fl_dispatch import call_op, get_default_manager, get_policy
from fl_dispatch.hosting.start import first_choices
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.ops import OPERATORS
from fl_dispatch.settings import get_settings
from fl_dispatch.types import BackendImplKind

from ..compat import versions
from . import compile
from .quantized_results import QUANTIZE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

FUSED = compile.FUSED
PRODUCTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"linear": (), "weight_only_linear": (), "scaled_linear": (QUANTIZE,)}
)
"""Product → the operators on its rows before it."""
NORM, GATE = "rms_norm", "silu_and_mul"
KEY = "fl_dispatch_one_token"
"""The key of the fused products in vLLM's ``additional_config``, which is part of its compile-cache key."""


def prepare(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Compile the range of one token separately if products are to be fused there, before dispatch is frozen.

    The fused operator is called for each type of weights, so that it is proven before a graph uses it. The fused
    products become a part of vLLM's compile-cache key.
    """
    products = to_join(vllm_config)
    kinds = {weight.dtype for weight in _weights(model)} if products else set()
    if not kinds:
        return
    dtype, device = vllm_config.model_config.dtype, next(model.parameters()).device
    samples = [*_samples(kinds, dtype, device)]
    for sample in samples:
        call_op(FUSED, *sample)
    if not samples or FUSED in get_default_manager().get_failed_impls():
        return
    compilation = vllm_config.compilation_config
    # vLLM drops an end of one token from its configuration, and reads the ranges when it compiles.
    compilation.compile_ranges_endpoints = sorted({1, *(compilation.compile_ranges_endpoints or ())})
    vllm_config.additional_config[KEY] = sorted(products)
    logger.info("%s: joined with norms and gates in graphs of one token", ", ".join(sorted(products)))


def joined_products(vllm_config: VllmConfig) -> frozenset[str]:
    """Return the products that :func:`prepare` found right; none before it ran."""
    return frozenset(vllm_config.additional_config.get(KEY, ()))


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights of linear layers, plain or packed."""
    for module in model.modules():
        for name in ("weight", "weight_packed", "qweight"):
            weight = vars(module)["_parameters"].get(name)
            if weight is not None and weight.dim() == 2:
                yield weight


def _samples(kinds: set[torch.dtype], dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Yield arguments of one row that some kernel takes: for each type of weights with a gate, and without."""
    declared = OPERATORS[FUSED].samples
    assert declared is not None
    left = {(kind, gated) for kind in kinds for gated in (False, True)}
    for sample in declared(dtype, device, torch.Generator().manual_seed(0)):
        row, weight, *_, gated = sample.args
        if (weight.dtype, gated) in left and row.shape[:-1].numel() == 1 and is_taken(sample.args):
            left.remove((weight.dtype, gated))
            yield sample.args


def to_join(vllm_config: VllmConfig) -> frozenset[str]:
    """Return the products that graphs of one token fuse; none if there is a reason against it."""
    if why_apart(vllm_config):
        return frozenset()
    return frozenset(product for product in PRODUCTS if _may_join(product))


def why_apart(vllm_config: VllmConfig) -> list[str]:
    """List every reason against fusing any product."""
    found = [
        (not get_settings().fuse_one_token, f"{compile.ASKED_TO_FUSE} is off"),
        (not versions.is_tested(), "it was not tested with this vLLM"),
        (
            not compile.has_passes(vllm_config.compilation_config),
            "our passes run in graphs that VLLM_COMPILE compiles with Inductor",
        ),
        (get_policy().batch_invariant, "a row must not depend on the batch"),
        (
            getattr(vllm_config.compilation_config, "compile_mm_encoder", False),
            "graphs of a compiled encoder may have one size",
        ),
        (
            vllm_config.model_config.uses_mrope,
            "a graph of one size expects other strides of positions that have several axes than vLLM gives it",
        ),
    ]
    return [why for holds, why in found if holds]


def _may_join(product: str) -> bool:
    """Whether a product may be fused: the user chooses no part's implementation, and all parts are of one backend."""
    parts = (product, *PRODUCTS[product], NORM, GATE)
    return first_choices.joins(FUSED, parts, 1) and first_choices.of_one_backend(FUSED, parts, 1)


def is_taken(operands: tuple[Any, ...]) -> bool:
    """Whether an implementation other than the reference takes a call; operands may be nodes of a graph."""
    manager = get_default_manager()
    given = (one.meta["val"] if isinstance(one, Node) else one for one in operands)
    chosen = manager.registry.get_implementation(FUSED, manager.get_selected_impl_id(FUSED, *given))
    return chosen is not None and chosen.kind is not BackendImplKind.REFERENCE

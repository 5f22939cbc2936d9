"""The kinds of quantized experts as SGLang knows them: a method at each layer that makes its parameters.

SGLang's loader asks a parameter's attributes which part of a checkpoint's tensor is a rank's: ``quant_method`` names
whose scale a scale is, ``is_transposed`` says that a weight's columns are its last dimension. All parameters are as the
checkpoint has them; :mod:`fl_dispatch.hosting.quantized.experts` brings them into an operator's form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from torch import Tensor, nn

from fl_dispatch.hosting.quantized import experts, orders

from ..bridge.base import Unbridged
from ..bridge.mixture import MIXTURE, Mixture, unsupported
from . import refused
from .schemes import CHANNEL, loads_columns_in_order, unset

BLOCK, GROUP = "block", "group"
"""Whose scale a scale of weights may be, beside a column's and a weight's."""


@dataclass(frozen=True)
class Sizes:
    """Those of a rank's experts.

    Args:
        count: experts.
        hidden: elements of a token.
        inner: elements between the two products of an expert.
        gates: parts of ``w13``, 2 with a gate.
        ranks: among which each expert is divided.
        dtype: of the model.
    """

    count: int
    hidden: int
    inner: int
    gates: int
    ranks: int
    dtype: torch.dtype

    def weights(self) -> Iterator[tuple[str, int, int]]:
        """``w13`` and ``w2``, with the columns and the elements of a row of an expert's weight."""
        yield "w13", self.gates * self.inner, self.hidden
        yield "w2", self.hidden, self.inner


@dataclass(frozen=True)
class Parameters:
    """A layer whose parameters are registered, with SGLang's loader."""

    layer: nn.Module
    loader: Callable[..., None]

    def add(self, name: str, values: Tensor, scale_of: str = "", transposed: bool = False) -> None:
        """Register values with a first dimension for experts; ``scale_of``: whose scales or zero points they are."""
        parameter = nn.Parameter(values, requires_grad=False)
        said = {"weight_loader": self.loader, "quant_method": scale_of, "is_transposed": transposed}
        vars(parameter).update(said)
        self.layer.register_parameter(name, parameter)


class Kind(experts.QuantizedExperts):
    """The part that all kinds share."""

    def create_weights(self, parameters: Parameters, sizes: Sizes) -> str:
        """Register the parameters that a checkpoint has; or the reason why this rank's part of them cannot be used."""
        raise NotImplementedError


class _EightBits(Kind):
    """Weights of 8 bits, as they are stored.

    Args:
        per: whose scale a scale is.
        given: whether the checkpoint has scales of inputs.
    """

    stored: ClassVar[torch.dtype]

    def __init__(self, per: str, given: bool) -> None:
        super().__init__()
        self._per, self._given = per, given

    def create_weights(self, parameters: Parameters, sizes: Sizes) -> str:
        for name, columns, inner in sizes.weights():
            stored = torch.empty(sizes.count, columns, inner, dtype=self.stored)
            parameters.add(f"{name}_weight", stored)
            of_one = (columns, 1) if self._per == CHANNEL else (sizes.gates if name == "w13" else 1,)
            parameters.add(f"{name}_weight_scale", unset(sizes.count, *of_one), self._per)
            if self._given:
                parameters.add(f"{name}_input_scale", unset(sizes.count))
        return ""


class Int8Experts(_EightBits, experts.Int8Experts):
    stored = torch.int8


class Fp8Experts(_EightBits, experts.Fp8Experts):
    stored = torch.float8_e4m3fn


class Fp8BlockExperts(Kind, experts.Fp8BlockExperts):
    """Blocks of ``fl_block`` by ``fl_block``."""

    def create_weights(self, parameters: Parameters, sizes: Sizes) -> str:
        block = self.fl_block
        if sizes.inner % block and sizes.ranks > 1:
            return f"experts whose {sizes.inner} elements on a rank are no whole number of blocks of {block}"
        for name, columns, inner in sizes.weights():
            stored = torch.empty(sizes.count, columns, inner, dtype=torch.float8_e4m3fn)
            parameters.add(f"{name}_weight", stored)
            parts = sizes.gates if name == "w13" else 1
            scales = unset(sizes.count, parts * -(-(columns // parts) // block), -(-inner // block))
            parameters.add(f"{name}_weight_scale_inv", scales, BLOCK)
        return ""


class _Packed(Kind, experts.PackedExperts):
    """Weights in words.

    Args:
        bits: of a weight, 4 or 8.
        group: elements of a row with a scale in common; -1 for all of them.
        zeros: whether zero points count.
    """

    packing: ClassVar[experts.Packing]
    has_zeros: ClassVar[bool]
    """Whether the checkpoint has zero points even where they do not count."""

    def __init__(self, bits: int, group: int, zeros: bool) -> None:
        super().__init__(self.packing, bits, zeros)
        self._group = group

    def create_weights(self, parameters: Parameters, sizes: Sizes) -> str:
        if reason := experts.indivisible((sizes.hidden, sizes.inner), self._bits, self._group):
            return reason
        packing, scale_of = self.packing, CHANNEL if self._group == -1 else GROUP
        for name, columns, inner in sizes.weights():
            groups = 1 if self._group == -1 else inner // self._group
            weight, scale = ((inner, columns), (groups, columns))
            if not packing.transposed:
                weight, scale = weight[::-1], scale[::-1]
            words = self._words(sizes.count, weight, packing.weight_dim)
            parameters.add(f"{name}_{packing.weight}", words, transposed=packing.transposed)
            scales = unset(sizes.count, *scale, dtype=sizes.dtype)
            parameters.add(f"{name}_{packing.scale}", scales, scale_of, packing.transposed)
            if self._zero_points or self.has_zeros:
                words = self._words(sizes.count, scale, packing.zero_dim)
                parameters.add(f"{name}_{packing.zero}", words, scale_of, packing.transposed)
            self._create_rest(parameters, sizes.count, name, inner)
        return ""

    def _words(self, count: int, shape: tuple[int, ...], packed: int) -> Tensor:
        """Words of numbers that lie packed along one dimension."""
        sizes = [size * self._bits // orders.WORD if dim == packed else size for dim, size in enumerate(shape)]
        return torch.zeros(count, *sizes, dtype=torch.int32)

    def _create_rest(self, parameters: Parameters, count: int, name: str, inner: int) -> None:
        """Register what a checkpoint has besides, and nobody reads."""


class PackedExperts(_Packed):
    """As ``compressed-tensors`` packs them."""

    packing, has_zeros = experts.COMPRESSED, False

    def _create_rest(self, parameters: Parameters, count: int, name: str, inner: int) -> None:
        parameters.add(f"{name}_weight_shape", torch.empty(count, 2, dtype=torch.int64))


class GptqExperts(_Packed):
    """As ``gptq`` packs them, transposed. Its zero points are all in the middle."""

    packing, has_zeros = experts.GPTQ, True

    def _create_rest(self, parameters: Parameters, count: int, name: str, inner: int) -> None:
        in_order = replace(parameters, loader=loads_columns_in_order(parameters.loader, self.fl_scope))
        in_order.add(f"{name}_g_idx", torch.empty(count, inner, dtype=torch.int32))


class AwqExperts(_Packed):
    """As ``awq`` packs them, transposed and out of order."""

    packing, has_zeros = experts.AWQ, True


class QuantizedExpertsMethod(FusedMoEMethodBase):
    """SGLang's way to a layer's kind of experts.

    Args:
        kind: of one layer.
        quant_config: of the model.

    Attributes:
        inner: elements of a token.
        dtype: of the model.
    """

    inner: int
    dtype: torch.dtype

    def __init__(self, kind: Kind, quant_config: Any) -> None:
        self.kind, self.quant_config = kind, quant_config

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader, owner = extra_weight_attrs["weight_loader"], type(layer).__name__
        self.inner, self.dtype = hidden_size, params_dtype
        # Loaders of other forms of a checkpoint, and those of a model's own, know SGLang's methods by name.
        if getattr(loader, "__func__", None) is not FusedMoE.weight_loader:
            raise refused(f"quantized experts that {owner} loads in a way of its own ({layer.layer_name})")
        if extra_weight_attrs.get("with_bias"):
            raise refused(f"quantized experts with biases ({layer.layer_name})")
        gates = 2 if layer.moe_runner_config.is_gated else 1
        place = hidden_size, intermediate_size_per_partition, gates, layer.moe_tp_size, params_dtype
        if reason := self.kind.create_weights(Parameters(layer, loader), Sizes(num_experts, *place)):
            raise refused(f"{reason} ({layer.layer_name})")

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        """None of SGLang's runs: ``apply`` is the whole computation."""
        try:
            MIXTURE.give(layer, Mixture(moe_runner_config))
        except Unbridged as reason:  # SGLang has no native experts for quantized weights
            raise ValueError(unsupported(f"quantized {reason}")) from reason

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Bring the parameters into the operator's form.

        Raises:
            ValueError: nobody computes these experts here, or one that waits for the device in the place of another.
        """
        self.kind.process_weights_after_loading(layer)
        if reason := self.kind.waiting(layer, self.dtype, MIXTURE.of(layer).activation):
            raise refused(f"these experts ({reason}; {layer.layer_name})")

    def apply(self, layer: nn.Module, dispatch_output: Any) -> Any:
        """SGLang's ``StandardCombineInput``."""
        mixture = MIXTURE.of(layer)
        if (reason := mixture.refusal(dispatch_output)) is not None:
            raise NotImplementedError(unsupported(reason))
        routing = mixture.routing(dispatch_output)
        return mixture.combine(self.kind.apply_experts(layer, dispatch_output.hidden_states, *routing, None))

"""Quantized layers in SGLang's form: an object at each layer that makes its parameters.

SGLang asks a layer's ``scheme`` for one of two loaders; the parameters of all kinds use the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import torch
from sglang.srt.layers import parameter
from sglang.srt.layers.parameter import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
    RowvLLMParameter,
)
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch import Tensor, nn

from fl_dispatch.hosting.quantized import blocks, layers, orders
from fl_dispatch.hosting.quantized.schemes import TENSOR, Kind, Scheme

from . import refused

Loader = Callable[..., None]


class Layer(layers.QuantizedLayer):
    """The part that all kinds share."""

    requires_weight_loader_v2 = True
    fl_given = False
    """Whether the checkpoint has input scales."""
    fl_divided = False
    """Whether other ranks have other columns."""
    fl_joins = True
    """Whether SGLang's DeepSeek loader joins two layers of this kind by concatenating their checkpoint tensors."""

    def create_weights(
        self, layer: Any, inner: int, parts: list[int], all_inner: int, dtype: torch.dtype, loader: Loader
    ) -> None:
        """Register the parameters that a checkpoint has.

        Args:
            layer: a linear layer.
            inner: elements of a row on this rank.
            parts: columns on this rank, of each of the layers that SGLang merged into this one.
            all_inner: elements of a row on all ranks.
            dtype: the model's dtype.
            loader: the layer's loader.
        """
        raise NotImplementedError


class _EightBits(Layer):
    """8-bit weights in their stored form."""

    stored: torch.dtype

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self._per, self.fl_given = scheme.weights.per, scheme.given
        self.fl_joins = self._per != TENSOR and not self.fl_given

    def create_weights(
        self, layer: Any, inner: int, parts: list[int], all_inner: int, dtype: torch.dtype, loader: Loader
    ) -> None:
        layer.logical_widths = parts
        stored = torch.empty(sum(parts), inner, dtype=self.stored)
        weight = ModelWeightParameter(data=stored, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        self._create_scale(layer, inner, parts, all_inner, loader)
        if self.fl_given:
            layer.register_parameter("input_scale", _scales_of_layers(parts, loader))

    def _create_scale(self, layer: Any, inner: int, parts: list[int], all_inner: int, loader: Loader) -> None:
        if self._per == TENSOR:
            scale = _scales_of_layers(parts, loader)
        else:
            scale = ChannelQuantScaleParameter(data=orders.unset(sum(parts), 1), output_dim=0, weight_loader=loader)
        layer.register_parameter("weight_scale", scale)


def _unread(parameter: Any, loaded: Tensor, *_: Any) -> None:
    """Load a checkpoint's value that no layer reads; the last one of joined layers stays."""
    parameter.data.copy_(loaded.flatten()[-parameter.numel() :].view_as(parameter))


class _ScalesOfLayers(PerTensorScaleParameter):
    """Scales that keep their loader, because SGLang's Qwen3-Next would give them one that copies a weight."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_weight_loader" or not hasattr(self, name):
            super().__setattr__(name, value)


def _scales_of_layers(parts: list[int], loader: Loader) -> Any:
    return _ScalesOfLayers(data=orders.unset(len(parts)), weight_loader=loader)


class Int8Layer(_EightBits, layers.Int8Layer):
    stored = torch.int8


class Fp8Layer(_EightBits, layers.Fp8Layer):
    stored = torch.float8_e4m3fn


class Fp8WeightLayer(_EightBits, layers.Fp8WeightLayer):
    stored = torch.float8_e4m3fn

    def create_weights(
        self, layer: Any, inner: int, parts: list[int], all_inner: int, dtype: torch.dtype, loader: Loader
    ) -> None:
        self.fl_dtype = dtype
        super().create_weights(layer, inner, parts, all_inner, dtype, loader)


class Fp8BlockLayer(_EightBits, layers.Fp8BlockLayer):
    """Blocks of ``fl_block`` by ``fl_block``.

    SGLang's Llama loads ``weight_scale_inv`` of ``fp8`` checkpoints as ``weight_scale``, other models do not.
    """

    stored = torch.float8_e4m3fn

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)
        self.fl_block = scheme.weights.block[0]

    def _create_scale(self, layer: Any, inner: int, parts: list[int], all_inner: int, loader: Loader) -> None:
        block = self.fl_block
        if reason := blocks.indivisible(inner, all_inner, block):
            raise refused(f"{reason} ({self.fl_scope})")
        made, count = BlockQuantScaleParameter, -(-sum(parts) // block)
        if not blocks.are_whole(parts, block, self.fl_divided):
            made, count, loader = GroupQuantScaleParameter, sum(parts), blocks.loads_rows(loader, block)
        scales = orders.unset(count, -(-inner // block))  # registered under both names, so that either fills them
        for name in ("weight_scale", "weight_scale_inv"):
            scale = made(data=scales, input_dim=1, output_dim=0, weight_loader=loader)
            layer.register_parameter(name, scale)


class _Packed(Layer, layers.PackedLayer):
    """Weights packed in int32."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        weights = scheme.weights
        self.fl_bits, self.fl_zero_points, self._group = weights.bits, not weights.symmetric, weights.group
        self.fl_rounding = scheme.rounding

    def create_weights(
        self, layer: Any, inner: int, parts: list[int], all_inner: int, dtype: torch.dtype, loader: Loader
    ) -> None:
        group = inner if self._group == -1 else self._group
        if inner % group or any(size % orders.whole_words(self.fl_bits) for size in (inner, *parts)):
            raise ValueError(
                f"{parts} columns of {inner} elements are no whole words of {self.fl_bits} bits, or no whole groups of "
                f"{group}"
            )
        self._create(layer, inner, sum(parts), group, dtype, loader)

    def _create(self, layer: Any, inner: int, columns: int, group: int, dtype: torch.dtype, loader: Loader) -> None:
        raise NotImplementedError

    def _words(self, shape: Sequence[int], packed: int, column: int, loader: Loader, of_groups: bool = False) -> Any:
        """Return an int32 parameter with numbers packed along dimension ``packed``, and columns along ``column``.

        A parameter ``of_groups`` is on every rank as a whole if a group is a whole row.
        """
        sizes = [-(-size * self.fl_bits // orders.WORD) if dim == packed else size for dim, size in enumerate(shape)]
        words = torch.zeros(*sizes, dtype=torch.int32)
        how = {"packed_dim": packed, "packed_factor": Fraction(orders.WORD, self.fl_bits), "weight_loader": loader}
        if of_groups and self._group == -1:
            return PackedColumnParameter(data=words, output_dim=column, **how)
        return PackedvLLMParameter(data=words, input_dim=1 - column, output_dim=column, **how)

    def _scales(self, shape: Sequence[int], column: int, dtype: torch.dtype, loader: Loader) -> Any:
        """Return scales of groups, or of columns if a group is a whole row."""
        values = orders.unset(*shape, dtype=dtype)
        if self._group == -1:
            return ChannelQuantScaleParameter(data=values, output_dim=column, weight_loader=loader)
        return GroupQuantScaleParameter(data=values, input_dim=1 - column, output_dim=column, weight_loader=loader)


class PackedLayer(_Packed):
    """The packing of ``compressed-tensors``."""

    fl_weights = ("weight_packed", "weight_scale", "weight_zero_point")

    def _create(self, layer: Any, inner: int, columns: int, group: int, dtype: torch.dtype, loader: Loader) -> None:
        shape = columns, inner // group
        layer.register_parameter("weight_packed", self._words((columns, inner), 1, 0, loader))
        layer.register_parameter("weight_scale", self._scales(shape, 0, dtype, loader))
        if self.fl_zero_points:
            layer.register_parameter("weight_zero_point", self._words(shape, 0, 0, loader, of_groups=True))
        size = BasevLLMParameter(data=torch.empty(2, dtype=torch.int64), weight_loader=_unread)
        layer.register_parameter("weight_shape", size)


class GptqLayer(_Packed):
    """The packing of ``gptq``, transposed. Its zero points are all the middle of the range."""

    fl_weights = ("qweight", "scales", "qzeros")
    fl_joins = False  # only for AWQ it knows that columns are the second dimension

    def _create(self, layer: Any, inner: int, columns: int, group: int, dtype: torch.dtype, loader: Loader) -> None:
        shape = inner // group, columns
        layer.register_parameter("qweight", self._words((inner, columns), 0, 1, loader))
        layer.register_parameter("scales", self._scales(shape, 1, dtype, loader))
        layer.register_parameter("qzeros", self._words(shape, 1, 1, loader, of_groups=True))
        order, loader = torch.empty(inner, dtype=torch.int32), orders.loads_columns_in_order(loader, self.fl_scope)
        layer.register_parameter("g_idx", RowvLLMParameter(data=order, input_dim=0, weight_loader=loader))


class AwqLayer(_Packed):
    """The packing of ``awq``, transposed, with the numbers of an int32 in another order."""

    fl_weights = ("qweight", "scales", "qzeros")
    fl_places = orders.AWQ_PLACES

    def _create(self, layer: Any, inner: int, columns: int, group: int, dtype: torch.dtype, loader: Loader) -> None:
        shape = inner // group, columns
        layer.register_parameter("qweight", self._words((inner, columns), 1, 1, loader))
        layer.register_parameter("scales", self._scales(shape, 1, dtype, loader))
        layer.register_parameter("qzeros", self._words(shape, 1, 1, loader, of_groups=True))


class _Grouped(Layer, layers.GroupedLayer):
    """Weights with scales of groups in their stored form."""

    def create_weights(  # type: ignore[override]
        self, layer: Any, inner: int, parts: list[int], all_inner: int, dtype: torch.dtype, loader: Loader
    ) -> None:
        super(Layer, self).create_weights(layer, parameter, inner, parts, dtype, loader)


class Int4Layer(_Grouped, layers.Int4Layer):
    """Integers of 4 bits, each in a byte."""


class Mxfp8Layer(_Grouped, layers.Mxfp8Layer):
    """MXFP8: fp8 with a power of two for each group."""


class Float4Layer(_Grouped, layers.Float4Layer):  # type: ignore[misc]  # SGLang has one more size
    """MXFP4 and NVFP4."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)
        self.fl_given, self.fl_joins = self.fl_rounding == layers.NVFP4, not self.fl_factors


KINDS: Mapping[Kind, Callable[[Scheme], Layer]] = MappingProxyType(
    {
        Kind.INT8: Int8Layer,
        Kind.FP8: Fp8Layer,
        Kind.FP8_WEIGHT: Fp8WeightLayer,
        Kind.FP8_BLOCKS: Fp8BlockLayer,
        Kind.COMPRESSED: PackedLayer,
        Kind.GPTQ: GptqLayer,
        Kind.AWQ: AwqLayer,
        Kind.INT4: Int4Layer,
        Kind.MXFP4: Float4Layer,
        Kind.NVFP4: Float4Layer,
        Kind.MXFP8: Mxfp8Layer,
    }
)
"""Kinds of layers → the class that makes their parameters."""


OF_DELTA_NETS = (".in_proj_qkvz", ".in_proj_ba")
"""Layers of delta nets.

SGLang's classes replace the loader of ``weight``, which Qwen3-Next requires. Qwen3.5's loader divides packed int32 as
if they were columns, so packed layers have an empty ``weight`` while they load.
"""


def _loads_heads(layer: Any, loader: Loader) -> Loader:
    """Wrap a loader so that it divides a tensor with all parts by rows: Qwen3-Next's checkpoints join them by head."""

    def load(parameter: Any, loaded: Tensor, part: Any = None) -> None:
        if part is None and hasattr(parameter, "output_dim"):
            rank = layer.tp_group.rank_in_group if layer.tp_group else 0
            parameter.load_column_parallel_weight(loaded, tp_rank=rank)
        else:
            loader(parameter, loaded, part)

    return load


class QuantizedMethod(LinearMethodBase):
    """SGLang's method for a layer's scheme.

    Args:
        scheme: one layer's scheme.
        quant_config: the model's configuration; SGLang's loaders read the block size from it.

    Attributes:
        inner: elements of a row on this rank.
    """

    inner: int

    def __init__(self, scheme: Layer, quant_config: Any) -> None:
        self.scheme, self.quant_config = scheme, quant_config

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader = extra_weight_attrs["weight_loader"]
        parts, self.inner = list(output_partition_sizes), input_size_per_partition
        self.scheme.fl_divided = sum(parts) != output_size
        of_delta_net = str(self.scheme.fl_scope).endswith(OF_DELTA_NETS)
        loader = _loads_heads(layer, loader) if of_delta_net else loader
        self.scheme.create_weights(layer, input_size_per_partition, parts, input_size, params_dtype, loader)
        if of_delta_net and not hasattr(layer, "weight"):
            vars(layer)["weight"] = BasevLLMParameter(data=torch.empty(0), weight_loader=loader)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        vars(layer).pop("weight", None)
        self.scheme.process_weights_after_loading(layer)
        if "weight" in layer._parameters and hasattr(layer, "weight_packed"):
            del layer.weight  # DeepSeek's second name of packed weights, in their loaded form

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.scheme.apply_weights(layer, x, bias)

"""The quantized product of a linear layer, one class per kind of weights; :mod:`.experts` has the classes of experts.

A host loads a layer's parameters, calls ``process_weights_after_loading`` once to put them into the operator's form,
and ``apply_weights`` for each product. Both hosts use these two names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ... import bind_op
from ...devices import detect_device
from ...ops.quantization import FP4, TENSOR, rounded
from ..layers.attribute import replaced
from ..layers.layer_kernels import KERNEL, LayerKernel
from . import blocks, orders, reencoding
from .schemes import FLOAT4_NAMES, TENSOR_GROUP, Scheme

NVFP4 = "nvfp4"
"""The rounding with a factor for all rows."""
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class QuantizedKernel(LayerKernel):
    """The part that linear layers and experts share."""

    fl_float8 = False
    """Whether weights are float8_e4m3fn."""
    fl_rounding = ""
    """The format to which rows are rounded before they meet weights in their stored form; empty for none."""

    @classmethod
    def fl_lacking(cls) -> str:
        """Return why no layer of this kind runs on this device; empty if it can."""
        device = detect_device()
        return f"{device.name} has no float8_e4m3fn" if cls.fl_float8 and not device.float8 else ""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the loaded parameters into the operator's form.

        Raises:
            ValueError: a parameter was not loaded.
        """
        raise NotImplementedError

    def _keep(self, layer: nn.Module, **parameters: Tensor | None) -> None:
        """Replace a layer's parameters by the operator's form.

        Raises:
            ValueError: a parameter was not loaded.
        """
        for name, value in parameters.items():
            if value is not None:
                self._check(name, value)
            setattr(layer, name, None if value is None else nn.Parameter(value, requires_grad=False))
        KERNEL.give(layer, self)

    def _check(self, name: str, value: Tensor) -> None:
        """Raise ``ValueError`` if a parameter was not loaded."""
        if orders.is_unset(value):
            raise ValueError(f"the checkpoint has no '{name}' for a layer that it quantizes ({self.fl_scope})")

    def _check_factor(self, name: str, value: Tensor) -> None:
        """Raise ``ValueError`` if a scale of all numbers was not loaded, or is not finite and positive."""
        self._check(name, value)
        wrong = value[~(value.isfinite() & (value > 0))]
        if wrong.numel():
            raise ValueError(f"the checkpoint's '{name}' has {wrong[0]:g}, which is no scale ({self.fl_scope})")


class QuantizedLayer(QuantizedKernel):
    """A linear layer."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product."""
        raise NotImplementedError

    def fl_exact(self) -> AbstractContextManager[Any]:
        """Round no rows in this block, so that a product with ones gives the weight: int8 rounds a one to 127/127.5."""
        return replaced(self, fl_rounding="")

    def fl_rows(self, x: Tensor) -> Tensor:
        """Return rows in the form in which they are multiplied."""
        return rounded(x, self.fl_rounding) if self.fl_rounding else x


class ScaledLayer(QuantizedLayer):
    """Rows and weights of 8 bits: ``quantize``, then ``scaled_linear``. Rows have computed scales, or a given one."""

    fl_operator = "scaled_linear"
    fl_weights = ("weight", "weight_scale")
    fl_type: str
    fl_block = 0
    fl_quantize: Callable[..., tuple[Tensor, Tensor]]

    def fl_bind(self, scope: str | None) -> None:
        super().fl_bind(scope)
        self.fl_quantize = bind_op("quantize", scope)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Expand weight scales to one per column; rows get none, one, or one for each merged layer."""
        rows, widths = getattr(layer, "input_scale", None), layer.logical_widths
        self._keep(
            layer,
            weight=layer.weight.data.contiguous(),
            weight_scale=orders.scale_of_columns(layer.weight_scale.data, widths),
            input_scale=None if rows is None else orders.scale_of_rows(rows.data, len(widths)),
        )

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product."""
        given, block = layer.input_scale, self.fl_block
        if given is not None and given.numel() > 1:
            return self._apply_apart(layer, x, bias)
        rows, scales = self.fl_quantize(x, self.fl_type, block if given is None else TENSOR, given)
        return self.fl_call(rows, scales, layer.weight, layer.weight_scale, bias, DTYPES[x.dtype], block)

    def _apply_apart(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the products of merged layers with different input scales."""
        widths = list(layer.logical_widths)
        biases = [None] * len(widths) if bias is None else torch.split(bias, widths)
        weights = zip(torch.split(layer.weight, widths), torch.split(layer.weight_scale, widths), biases, strict=True)
        found = []
        for scale, (weight, columns, added) in zip(torch.split(layer.input_scale, 1), weights, strict=True):
            rows, scales = self.fl_quantize(x, self.fl_type, TENSOR, scale)
            found.append(self.fl_call(rows, scales, weight, columns, added, DTYPES[x.dtype], 0))
        return torch.cat(found, -1)


class Int8Layer(ScaledLayer):
    """``int8`` with rows quantized at run time, or by a scale of the checkpoint."""

    fl_type = "int8"


class Fp8Layer(ScaledLayer):
    """``fp8`` with a scale for each column, merged layer or weight.

    A host may ask for one scale for all rows of a batch; here each row gets its own, so that a request's tokens do not
    depend on other requests.
    """

    fl_type = "float8_e4m3fn"
    fl_float8 = True


class Fp8BlockLayer(ScaledLayer):
    """``fp8`` with a scale for each square block, as in DeepSeek-V3; ``fl_block`` is the block's size."""

    fl_type = "float8_e4m3fn"
    fl_float8 = True

    fl_parts: Sequence[int] = ()
    """Columns of the merged layers, if each was padded to whole blocks."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read scales named ``weight_scale_inv`` in ``fp8`` checkpoints, and ``weight_scale`` by some models."""
        names = [name for name in ("weight_scale_inv", "weight_scale") if hasattr(layer, name)]
        found = [getattr(layer, name).data for name in names]
        scale = next((values for values in found if not orders.is_unset(values)), found[0]).float().contiguous()
        weight = layer.weight.data.contiguous()
        if scale.shape[0] == weight.shape[0] > 1:
            weight, scale = self._in_blocks(weight, scale, layer.logical_widths)
        self._keep(
            layer,
            weight=weight,
            weight_scale=scale,
            weight_scale_inv=None,
            input_scale=None,
        )

    def _in_blocks(self, weight: Tensor, scale: Tensor, parts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a weight with a scale per row as one of whole blocks."""
        block = self.fl_block
        merged = blocks.of_rows(scale, [sum(parts)], block)  # the checkpoint merged the layers
        if merged is not None:
            return weight, merged
        apart = blocks.of_rows(scale, parts, block)
        if apart is None:
            raise ValueError(
                f"ranks cut blocks of {block} of a weight in fp8: {list(parts)} columns on a rank ({self.fl_scope}); "
                f"use fewer ranks"
            )
        self.fl_parts = tuple(parts)
        return blocks.padded(weight, parts, block), apart

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product."""
        parts, block = self.fl_parts, self.fl_block
        if not parts:
            return super().apply_weights(layer, x, bias)
        bias = None if bias is None else blocks.padded(bias, parts, block)
        return blocks.without_padding(super().apply_weights(layer, x, bias), parts, block)


class Fp8WeightLayer(QuantizedLayer):
    """Weights of ``fp8`` for unquantized rows, in ``fl_dtype``."""

    fl_operator = "weight_only_linear"
    fl_weights = ("weight", "weight_scale")
    fl_float8 = True
    fl_dtype: torch.dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Expand scales to one per column."""
        scale = orders.scale_of_columns(layer.weight_scale.data, layer.logical_widths)
        self._keep(layer, weight=layer.weight.data.contiguous(), weight_scale=scale.to(self.fl_dtype))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product."""
        return self.fl_call(x, layer.weight, layer.weight_scale, None, bias)


class PackedLayer(QuantizedLayer):
    """Weights of ``fl_bits`` (2, 3, 4 or 8), packed in int32, for unquantized rows.

    ``fl_weights`` names the weight, its scales and its zero points, which count if ``fl_zero_points``; ``fl_places``
    are the places of numbers in an int32.
    """

    fl_operator = "weight_only_linear"
    fl_bits: int
    fl_zero_points: bool
    fl_places: Sequence[int] | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Unpack the numbers in int32. A parameter with ``output_dim`` 1 is transposed."""
        weight_name, scale_name, zero_name = self.fl_weights
        weight, scale = getattr(layer, weight_name), getattr(layer, scale_name).data
        if weight.output_dim == 1:
            scale = scale.t()
        zeros = None
        if self.fl_zero_points:
            zeros = orders.zero_points(self._numbers(getattr(layer, zero_name)), self.fl_bits)
        forms = {weight_name: orders.packed_weight(self._numbers(weight), self.fl_bits), zero_name: zeros}
        self._keep(layer, **forms, **{scale_name: scale.contiguous()})

    def _numbers(self, packed: Any) -> Tensor:
        numbers = orders.unpack(packed.data, self.fl_bits, packed.packed_dim, self.fl_places)
        return numbers.t() if packed.output_dim == 1 else numbers

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product."""
        weight, scale, zero = (getattr(layer, name) for name in self.fl_weights)
        return self.fl_call(self.fl_rows(x), weight, scale, zero, bias)


class GroupedLayer(QuantizedLayer):
    """Weights with a scale for each group of a row, for unquantized rows or rows rounded as by quantization."""

    fl_operator = "weight_only_linear"
    fl_weights = ("weight", "weight_scale")
    fl_dtype: torch.dtype

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.fl_group, self.fl_rounding = scheme.weights.group, scheme.rounding

    def create_weights(
        self, layer: Any, kinds: Any, inner: int, parts: list[int], dtype: torch.dtype, loader: Callable[..., None]
    ) -> None:
        """Register the parameters that a checkpoint has.

        Args:
            layer: a linear layer.
            kinds: the host's module with the classes of parameters.
            inner: elements of a row on this rank.
            parts: columns on this rank, of each of the layers that the host merged into this one.
            dtype: the model's dtype.
            loader: the layer's loader.
        """
        group = inner if self.fl_group == -1 else self.fl_group
        if inner % group:
            raise ValueError(f"rows of {inner} elements are no whole groups of {group} ({self.fl_scope})")
        layer.logical_widths, self.fl_dtype, columns = parts, dtype, sum(parts)
        how = {"output_dim": 0, "weight_loader": loader}
        weight, scales = self._stored(columns, inner, inner // group)
        layer.register_parameter(self.fl_weights[0], kinds.ModelWeightParameter(data=weight, input_dim=1, **how))
        if self.fl_group == -1:
            scale = kinds.ChannelQuantScaleParameter(data=scales, **how)
        else:
            scale = kinds.GroupQuantScaleParameter(data=scales, input_dim=1, **how)
        layer.register_parameter("weight_scale", scale)

    def _stored(self, columns: int, inner: int, groups: int) -> tuple[Tensor, Tensor]:
        """Return space for a checkpoint's weight, and for its scales, marked as not loaded."""
        raise NotImplementedError

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product."""
        weight, scale = (getattr(layer, name) for name in self.fl_weights)
        return self.fl_call(self.fl_rows(x), weight, scale, None, bias)


class Int4Layer(GroupedLayer):
    """4-bit integers, each in a byte of the checkpoint, for rows rounded as by quantization to int8."""

    def _stored(self, columns: int, inner: int, groups: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(columns, inner, dtype=torch.int8), orders.unset(columns, groups, dtype=self.fl_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack two numbers per byte, as the operator takes them."""
        weight = orders.packed_weight(layer.weight.data.int() + 8, 4)
        self._keep(layer, weight=weight, weight_scale=layer.weight_scale.data.contiguous())


class Mxfp8Layer(GroupedLayer):
    """``fp8`` with a power of two for each group, for unquantized rows or rows rounded in the same way."""

    fl_float8 = True

    def _stored(self, columns: int, inner: int, groups: int) -> tuple[Tensor, Tensor]:
        weight = torch.empty(columns, inner, dtype=torch.float8_e4m3fn)
        return weight, orders.unset(columns, groups, dtype=torch.uint8)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert scales to the model's dtype."""
        scale = orders.scales_of_bytes(layer.weight_scale.data, self.fl_dtype)
        self._keep(layer, weight=layer.weight.data.contiguous(), weight_scale=scale)


class Float4Layer(GroupedLayer):
    """Weights of e2m1 for unquantized rows, or rows rounded as by quantization to e2m1."""

    fl_factors: tuple[str, ...] = ()
    """The parameters with the scales of the whole weight, and of its rows."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)
        names = FLOAT4_NAMES[scheme.method]
        self.fl_weights, self.fl_divides = (names.weight, "weight_scale"), names.divides
        if scheme.weights.per == TENSOR_GROUP:
            self.fl_factors = (names.of_weight, names.of_rows)[: 1 + bool(self.fl_rounding)]

    def create_weights(
        self, layer: Any, kinds: Any, inner: int, parts: list[int], dtype: torch.dtype, loader: Callable[..., None]
    ) -> None:
        """Register the parameters that a checkpoint has, see :class:`GroupedLayer`."""
        super().create_weights(layer, kinds, inner, parts, dtype, loader)
        for name in self.fl_factors:
            scale = kinds.PerTensorScaleParameter(data=orders.unset(len(parts)), weight_loader=loader)
            layer.register_parameter(name, scale)

    def _stored(self, columns: int, inner: int, groups: int) -> tuple[Tensor, Tensor]:
        kind = torch.float8_e4m3fn if self.fl_factors else torch.uint8
        return torch.zeros(columns, inner // 2, dtype=torch.uint8), orders.unset(columns, groups, dtype=kind)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the bytes, and merge the scales of rows or weights into those of groups."""
        factor, of_rows, widths = None, None, layer.logical_widths
        for name in self.fl_factors:
            given = getattr(layer, name).data
            columns = self._factor(name, orders.scale_of_columns(given, widths))
            factor = columns if factor is None else factor * columns
            if name != self.fl_factors[0]:
                of_rows = 1 / self._factor(name, orders.scale_of_rows(given, len(widths)))
        weight, scale = (getattr(layer, name).data for name in self.fl_weights)
        scale, weight = orders.scales_of_bytes(scale, self.fl_dtype, factor), weight.contiguous().view(FP4)
        if factor is None and reencoding.asked():
            self._check(self.fl_weights[1], scale)
            weight, scale = reencoding.in_blocks(f"{self.fl_scope}.{self.fl_weights[0]}", weight, scale)
        factors = dict(zip(self.fl_factors, (None, of_rows), strict=False))
        self._keep(layer, **dict(zip(self.fl_weights, (weight, scale), strict=True)), **factors)

    def _factor(self, name: str, scales: Tensor) -> Tensor:
        self._check_factor(name, scales)
        return scales.reciprocal() if self.fl_divides else scales

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product."""
        if self.fl_rounding != NVFP4:
            return super().apply_weights(layer, x, bias)
        weight, scale = (getattr(layer, name) for name in self.fl_weights)
        of_rows, widths = getattr(layer, self.fl_factors[1]), list(layer.logical_widths)
        if of_rows.numel() == 1:
            return self.fl_call(rounded(x, NVFP4, of_rows), weight, scale, None, bias)
        biases = [None] * len(widths) if bias is None else torch.split(bias, widths)
        # Bytes, because some operations of PyTorch do not support e2m1.
        weights = zip(torch.split(weight.view(torch.uint8), widths), torch.split(scale, widths), biases, strict=True)
        found = []
        for factor, (part, scales, added) in zip(torch.split(of_rows, 1), weights, strict=True):
            found.append(self.fl_call(rounded(x, NVFP4, factor), part.view(FP4), scales, None, added))
        return torch.cat(found, -1)

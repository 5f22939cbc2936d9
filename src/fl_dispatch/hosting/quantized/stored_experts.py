"""Parameters of quantized experts in the checkpoint's form, one class per kind, for the loaders of both hosts.

A parameter's attributes tell a loader a rank's part of a checkpoint's tensor: ``quant_method`` names the unit that
shares a scale, ``is_transposed`` says that a weight's columns are its last dimension. :mod:`.experts` converts the
parameters to an operator's form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import experts, orders
from .layers import NVFP4
from .schemes import BLOCK, CHANNEL, FLOAT4_NAMES, GROUP, TENSOR, TENSOR_GROUP, Kind, Scheme


@dataclass(frozen=True)
class Sizes:
    """Sizes of a rank's experts.

    Args:
        count: number of experts.
        hidden: elements of a token.
        inner: elements between the two products of an expert.
        gates: parts of ``w13``, 2 with a gate.
        ranks: number of ranks that share each expert.
        dtype: the model's dtype.
    """

    count: int
    hidden: int
    inner: int
    gates: int
    ranks: int
    dtype: torch.dtype

    def weights(self) -> Iterator[tuple[str, int, int]]:
        """Yield ``w13`` and ``w2`` with the columns and row elements of an expert's weight."""
        yield "w13", self.gates * self.inner, self.hidden
        yield "w2", self.hidden, self.inner


@dataclass(frozen=True)
class Parameters:
    """A layer on which to register parameters.

    Args:
        layer: the host's layer.
        said: attributes of each parameter for a host's loader, including the loader.
        reads_order: whether the loader takes ``g_idx`` of ``gptq``.
    """

    layer: nn.Module
    said: Mapping[str, Any]
    reads_order: bool = False

    def add(self, name: str, values: Tensor, scale_of: str = "", transposed: bool = False) -> None:
        """Register values with a first dimension for experts; ``scale_of``: the unit that shares a scale or zero."""
        parameter = nn.Parameter(values, requires_grad=False)
        vars(parameter).update(self.said, quant_method=scale_of, is_transposed=transposed)
        self.layer.register_parameter(name, parameter)


class Experts(experts.QuantizedExperts):
    """The part that all kinds share."""

    def create_weights(self, parameters: Parameters, sizes: Sizes) -> str:
        """Register the parameters that a checkpoint has; or return why this rank's part of them cannot be used."""
        raise NotImplementedError


class _EightBits(Experts):
    """8-bit weights in their stored form."""

    stored: ClassVar[torch.dtype]

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self._per, self._given = scheme.weights.per, scheme.given

    def create_weights(self, parameters: Parameters, sizes: Sizes) -> str:
        for name, columns, inner in sizes.weights():
            stored = torch.empty(sizes.count, columns, inner, dtype=self.stored)
            parameters.add(f"{name}_weight", stored)
            of_one = (columns, 1) if self._per == CHANNEL else (sizes.gates if name == "w13" else 1,)
            parameters.add(f"{name}_weight_scale", orders.unset(sizes.count, *of_one), self._per)
            if self._given:
                parameters.add(f"{name}_input_scale", orders.unset(sizes.count))
        return ""


class Int8Experts(_EightBits, experts.Int8Experts):
    stored = torch.int8


class Fp8Experts(_EightBits, experts.Fp8Experts):
    stored = torch.float8_e4m3fn


class Fp8WeightExperts(_EightBits, experts.Fp8WeightExperts):
    stored = torch.float8_e4m3fn

    def create_weights(self, parameters: Parameters, sizes: Sizes) -> str:
        self.fl_dtype = sizes.dtype
        return super().create_weights(parameters, sizes)


class Fp8BlockExperts(Experts, experts.Fp8BlockExperts):
    """Blocks of ``fl_block`` by ``fl_block``."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme.weights.block[0], "weight_scale" if scheme.form else "weight_scale_inv")

    def create_weights(self, parameters: Parameters, sizes: Sizes) -> str:
        block = self.fl_block
        if sizes.inner % block and sizes.ranks > 1:
            return f"experts with {sizes.inner} elements on a rank, not a multiple of a block's {block}"
        for name, columns, inner in sizes.weights():
            stored = torch.empty(sizes.count, columns, inner, dtype=torch.float8_e4m3fn)
            parameters.add(f"{name}_weight", stored)
            parts = sizes.gates if name == "w13" else 1
            scales = orders.unset(sizes.count, parts * -(-(columns // parts) // block), -(-inner // block))
            parameters.add(f"{name}_{self._scale}", scales, BLOCK)
        return ""


class _Packed(Experts, experts.PackedExperts):
    """Weights packed in int32."""

    packing: ClassVar[experts.Packing]
    has_zeros: ClassVar[bool]
    """Whether the checkpoint has zero points even if they do not count."""

    def __init__(self, scheme: Scheme) -> None:
        weights = scheme.weights
        super().__init__(self.packing, weights.bits, not weights.symmetric)
        self._group, self.fl_rounding = weights.group, scheme.rounding

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
            scales = orders.unset(sizes.count, *scale, dtype=sizes.dtype)
            parameters.add(f"{name}_{packing.scale}", scales, scale_of, packing.transposed)
            if self._zero_points or self.has_zeros:
                words = self._words(sizes.count, scale, packing.zero_dim)
                parameters.add(f"{name}_{packing.zero}", words, scale_of, packing.transposed)
            self._create_rest(parameters, sizes.count, name, inner)
        return ""

    def _words(self, count: int, shape: tuple[int, ...], packed: int) -> Tensor:
        """Return an int32 parameter with numbers packed along one dimension."""
        sizes = [size * self._bits // orders.WORD if dim == packed else size for dim, size in enumerate(shape)]
        return torch.zeros(count, *sizes, dtype=torch.int32)

    def _create_rest(self, parameters: Parameters, count: int, name: str, inner: int) -> None:
        """Register a checkpoint's other tensors, which are not used."""


class PackedExperts(_Packed):
    """The packing of ``compressed-tensors``."""

    packing, has_zeros = experts.COMPRESSED, False

    def _create_rest(self, parameters: Parameters, count: int, name: str, inner: int) -> None:
        parameters.add(f"{name}_weight_shape", torch.empty(count, 2, dtype=torch.int64))


class GptqExperts(_Packed):
    """The packing of ``gptq``, transposed. Its zero points are all the middle of the range."""

    packing, has_zeros = experts.GPTQ, True

    def _create_rest(self, parameters: Parameters, count: int, name: str, inner: int) -> None:
        if parameters.reads_order:
            loader = orders.loads_columns_in_order(parameters.said["weight_loader"], self.fl_scope)
            in_order = replace(parameters, said={**parameters.said, "weight_loader": loader})
            in_order.add(f"{name}_g_idx", torch.empty(count, inner, dtype=torch.int32))


class AwqExperts(_Packed):
    """The packing of ``awq``, transposed, with the numbers of an int32 in another order."""

    packing, has_zeros = experts.AWQ, True


class _Grouped(Experts):
    """Weights with scales of groups in their stored form."""

    fl_dtype: torch.dtype

    def _read(self, scheme: Scheme, weight: str = "weight") -> None:
        """Prepare for a scheme; ``weight``: the name of a weight after ``w13_``."""
        self._bits, self._group, self.fl_rounding = scheme.weights.bits, scheme.weights.group, scheme.rounding
        self._weight = weight

    def create_weights(self, parameters: Parameters, sizes: Sizes) -> str:
        if reason := experts.indivisible((sizes.hidden, sizes.inner), self._bits, self._group):
            return reason
        self.fl_dtype, scale_of = sizes.dtype, CHANNEL if self._group == -1 else GROUP
        for name, columns, inner in sizes.weights():
            groups = 1 if self._group == -1 else inner // self._group
            weight, scales = self._stored((sizes.count, columns), inner, groups)
            parameters.add(f"{name}_{self._weight}", weight, GROUP)
            parameters.add(f"{name}_weight_scale", scales, scale_of)
        return ""

    def _stored(self, columns: tuple[int, int], inner: int, groups: int) -> tuple[Tensor, Tensor]:
        """Return space for a checkpoint's weights, and for their scales, marked as not loaded."""
        raise NotImplementedError


class Int4Experts(_Grouped, experts.Int4Experts):
    """One number per byte."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self._read(scheme)

    def _stored(self, columns: tuple[int, int], inner: int, groups: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(*columns, inner, dtype=torch.int8), orders.unset(*columns, groups, dtype=self.fl_dtype)


class Mxfp8Experts(_Grouped, experts.Mxfp8Experts):
    """Weights of ``fp8`` with scales of 8 bits."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self._read(scheme)

    def _stored(self, columns: tuple[int, int], inner: int, groups: int) -> tuple[Tensor, Tensor]:
        weight = torch.empty(*columns, inner, dtype=torch.float8_e4m3fn)
        return weight, orders.unset(*columns, groups, dtype=torch.uint8)


class Float4Experts(_Grouped, experts.Float4Experts):
    """Weights of e2m1 with scales of 8 bits."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(FLOAT4_NAMES[scheme.method], scheme.weights.per == TENSOR_GROUP)
        self._read(scheme, self._names.weight)

    def create_weights(self, parameters: Parameters, sizes: Sizes) -> str:
        reason = super().create_weights(parameters, sizes)
        owners = [self._names.of_weight] if self._of_weight else []
        owners += [self._names.of_rows] if self.fl_rounding == NVFP4 else []
        for name, gates in (("w13", sizes.gates), ("w2", 1)) if not reason else ():
            for owner in owners:
                parameters.add(f"{name}_{owner}", orders.unset(sizes.count, gates), TENSOR)
        return reason

    def _stored(self, columns: tuple[int, int], inner: int, groups: int) -> tuple[Tensor, Tensor]:
        kind = torch.float8_e4m3fn if self._of_weight else torch.uint8
        return torch.zeros(*columns, inner // 2, dtype=torch.uint8), orders.unset(*columns, groups, dtype=kind)


KINDS: Mapping[Kind, Callable[[Scheme], Experts]] = MappingProxyType(
    {
        Kind.INT8: Int8Experts,
        Kind.FP8: Fp8Experts,
        Kind.FP8_WEIGHT: Fp8WeightExperts,
        Kind.FP8_BLOCKS: Fp8BlockExperts,
        Kind.COMPRESSED: PackedExperts,
        Kind.GPTQ: GptqExperts,
        Kind.AWQ: AwqExperts,
        Kind.GPT_OSS: Float4Experts,
        Kind.INT4: Int4Experts,
        Kind.MXFP4: Float4Experts,
        Kind.NVFP4: Float4Experts,
        Kind.MXFP8: Mxfp8Experts,
    }
)
"""Kinds of experts → the class that makes their parameters."""

"""The quantized experts of a layer, one class per kind of weights.

As in :mod:`.layers`, a host loads the parameters of all experts of a rank, with a first dimension for experts:
``w13_…`` for the gate followed by ``up``, ``w2_…`` for the second product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import explain
from ...ops.quantization import FP4
from . import blocks, orders, reencoding
from .layers import NVFP4, QuantizedKernel
from .schemes import Float4Names

NAMES = ("w13", "w2")
ASKED = (1, 8192)
"""Tokens of the calls that are checked before a model starts: one new token, and prompts."""


def indivisible(sizes: Iterable[int], bits: int, group: int) -> str:
    """Return why a rank's share of packed weights has no whole number of packed int32 or groups; empty if it has.

    Hosts round such numbers down, and would load mismatched parts.

    Args:
        sizes: elements of the rows of both weights on this rank.
        bits: bits of a number.
        group: elements that share a scale; not positive for a whole row.
    """
    for size in sizes:
        if group > 0 and size % group:
            return f"experts with {size} elements on a rank, not a multiple of a group's {group}"
        if size % (whole := orders.whole_words(bits)):
            return f"experts with {size} elements on a rank, not a multiple of a word's {whole}"
    return ""


class QuantizedExperts(QuantizedKernel):
    """The part that all kinds share."""

    fl_traced = False

    def apply_experts(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: str,
        on_input: bool,
        expert_map: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """Return the mixture; parameters as in ``fused_moe``."""
        routing = (topk_weights, topk_ids, activation, on_input, expert_map)
        return self.fl_call(*self._arguments(layer, x, routing, out))

    def waiting(self, layer: Any, dtype: torch.dtype, activation: str) -> str:
        """Return why calls of a layer, with few or many tokens, lack an implementation that a graph can hold.

        Empty if they have one, or if the policy puts one without graphs first.
        """
        reasons = (self._waiting(layer, dtype, activation, tokens) for tokens in ASKED)
        return next(filter(None, reasons), "")

    def _waiting(self, layer: Any, dtype: torch.dtype, activation: str, tokens: int) -> str:
        """Return the reason of :meth:`waiting` for calls of this many tokens."""
        first = explain(self.fl_operator, scope=self.fl_scope).chosen
        weight = self.weight_of(layer, "w2")[0]
        x, ids = (
            weight.new_empty((tokens, size), dtype=kind) for size, kind in ((weight.shape[1], dtype), (1, torch.int32))
        )
        args = self._arguments(layer, x, (x[:, :1].float(), ids, activation, False, None), None)
        found = explain(self.fl_operator, *args, scope=self.fl_scope)
        if found.chosen is None:
            return "; ".join(f"{impl.impl_id}: {reason}" for impl, reason in found.refusals.items() if reason)
        if first is None or not first.traits.graphs or found.chosen.traits.graphs:
            return ""
        return found.refusals[first]

    def _arguments(self, layer: Any, x: Tensor, routing: tuple[Any, ...], out: Tensor | None) -> tuple[Any, ...]:
        weights = (value for name in NAMES for value in self.weight_of(layer, name))
        biases = (getattr(layer, f"{name}_bias", None) for name in NAMES)
        return x, *weights, *routing, *biases, *self._rest(layer), out, *self._last(layer)

    def weight_of(self, layer: Any, name: str) -> tuple[Tensor, Tensor]:
        """Return a weight, ``"w13"`` or ``"w2"``, and its scales."""
        raise NotImplementedError

    def _rest(self, layer: Any) -> tuple[Any, ...]:
        """Return the arguments between the biases and ``out``."""
        raise NotImplementedError

    def _last(self, layer: Any) -> tuple[Any, ...]:
        """Return the arguments after ``out``."""
        return ()


class ScaledExperts(QuantizedExperts):
    """Rows and weights of 8 bits: ``scaled_moe``. Each row has a scale, or an expert has one for all rows."""

    fl_operator = "scaled_moe"
    fl_weights: tuple[str, ...] = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    fl_block = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        """Expand scales to one for each column of each expert."""
        for name in NAMES:
            weight, scale = (getattr(layer, f"{name}_{part}").data for part in ("weight", "weight_scale"))
            rows = getattr(layer, f"{name}_input_scale", None)
            self._keep(
                layer,
                **{
                    f"{name}_weight": weight.contiguous(),
                    f"{name}_weight_scale": orders.scale_of_experts(scale, weight.shape[1]),
                    f"{name}_input_scale": None if rows is None else rows.data.float(),
                },
            )

    def weight_of(self, layer: Any, name: str) -> tuple[Tensor, Tensor]:
        return getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")

    def _rest(self, layer: Any) -> tuple[Any, ...]:
        return layer.w13_input_scale, layer.w2_input_scale, self.fl_block


class Int8Experts(ScaledExperts):
    """``int8``."""


class Fp8Experts(ScaledExperts):
    """``fp8`` with a scale for each column, or for each weight of the checkpoint; see :class:`.layers.Fp8Layer`."""

    fl_float8 = True


class Fp8BlockExperts(ScaledExperts):
    """``fp8`` with a scale for each square block, as in DeepSeek-V3.

    Args:
        block: rows and columns of a block.
        scale: the format's name for a weight's scales.
    """

    fl_float8 = True

    def __init__(self, block: int, scale: str) -> None:
        super().__init__()
        self.fl_block, self._scale = block, scale
        self.fl_weights = tuple(f"{name}_{part}" for name in NAMES for part in ("weight", scale))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep scales of blocks.

        Elements between the two products that do not fill a block are padded with zeros, which do not change the
        result.
        """
        block, inner = self.fl_block, layer.w2_weight.shape[-1]
        gates = layer.w13_weight.shape[1] // inner if inner else 1
        for name in NAMES:
            weight, scale = (value.data.contiguous() for value in self.weight_of(layer, name))
            if inner % block:
                parts, dim = ([inner] * gates, 1) if name == "w13" else ([inner], 2)
                weight = blocks.padded(weight, parts, block, dim)
            forms = {f"{name}_weight": weight, f"{name}_{self._scale}": scale.float(), f"{name}_input_scale": None}
            self._keep(layer, **forms)
        if inner % block and (bias := getattr(layer, "w13_bias", None)) is not None:
            self._keep(layer, w13_bias=blocks.padded(bias.data, [inner] * gates, block, 1))

    def weight_of(self, layer: Any, name: str) -> tuple[Tensor, Tensor]:
        return getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_{self._scale}")


@dataclass(frozen=True)
class Packing:
    """A checkpoint's packing of an expert's weight in int32.

    Args:
        weight: the parameter's name after ``w13_``.
        scale: the name of its scales.
        zero: the name of its zero points.
        weight_dim: the dimension of a weight along which numbers are packed in int32.
        zero_dim: the packed dimension of zero points.
        transposed: whether rows of the operator's weight are columns of the parameter.
        places: the places of numbers in an int32, if they are not in order.
    """

    weight: str
    scale: str
    zero: str
    weight_dim: int
    zero_dim: int
    transposed: bool
    places: Sequence[int] | None = None


GPTQ = Packing("qweight", "scales", "qzeros", 0, 1, transposed=True)
AWQ = Packing("qweight", "scales", "qzeros", 1, 1, transposed=True, places=orders.AWQ_PLACES)
COMPRESSED = Packing("weight_packed", "weight_scale", "weight_zero_point", 1, 0, transposed=False)


class WeightOnlyExperts(QuantizedExperts):
    """Weights for unquantized rows, or rows rounded as ``fl_rounding`` says: ``weight_only_moe``."""

    fl_operator = "weight_only_moe"
    fl_weights: tuple[str, ...] = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    fl_dtype: torch.dtype
    """The model's dtype."""

    def weight_of(self, layer: Any, name: str) -> tuple[Tensor, Tensor]:
        weight, scale = (name_of for name_of in self.fl_weights if name_of.startswith(f"{name}_"))
        return getattr(layer, weight), getattr(layer, scale)

    def _rest(self, layer: Any) -> tuple[Any, ...]:
        return None, None

    def _last(self, layer: Any) -> tuple[Any, ...]:
        return None, None, self.fl_rounding


class PackedExperts(WeightOnlyExperts):
    """Weights of 4 or 8 bits, packed in int32.

    Args:
        packing: the checkpoint's packing.
        bits: bits of a number.
        zero_points: whether the checkpoint's zero points count.
    """

    def __init__(self, packing: Packing, bits: int, zero_points: bool) -> None:
        super().__init__()
        self._packing, self._bits, self._zero_points = packing, bits, zero_points
        parts = (packing.weight, packing.scale, packing.zero)
        self.fl_weights = tuple(f"{name}_{part}" for name in NAMES for part in parts)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Unpack the numbers in int32, expert by expert."""
        packing, bits = self._packing, self._bits
        for name in NAMES:
            words, scale = (getattr(layer, f"{name}_{part}").data for part in (packing.weight, packing.scale))
            # A rank without experts has one empty part.
            weights = [orders.packed_weight(self._numbers(one, packing.weight_dim), bits) for one in words.split(1)]
            zeros = None
            if self._zero_points:
                packed = getattr(layer, f"{name}_{packing.zero}").data
                parts = packed.split(1)
                zeros = torch.cat([orders.zero_points(self._numbers(one, packing.zero_dim), bits) for one in parts])
            self._keep(
                layer,
                **{
                    f"{name}_{packing.weight}": torch.cat(weights),
                    f"{name}_{packing.scale}": (scale.transpose(1, 2) if packing.transposed else scale).contiguous(),
                    f"{name}_{packing.zero}": zeros,
                },
            )

    def _numbers(self, words: Tensor, dim: int) -> Tensor:
        numbers = orders.unpack(words, self._bits, 1 + dim, self._packing.places)
        return numbers.transpose(1, 2) if self._packing.transposed else numbers

    def weight_of(self, layer: Any, name: str) -> tuple[Tensor, Tensor]:
        return getattr(layer, f"{name}_{self._packing.weight}"), getattr(layer, f"{name}_{self._packing.scale}")

    def _rest(self, layer: Any) -> tuple[Any, ...]:
        return tuple(getattr(layer, f"{name}_{self._packing.zero}") for name in NAMES)


class Int4Experts(WeightOnlyExperts):
    """4-bit integers; see :class:`.layers.Int4Layer`."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack two numbers per byte, as the operator takes them."""
        for name in NAMES:
            weight, scale = (value.data for value in self.weight_of(layer, name))
            packed = torch.cat([orders.packed_weight(one + 8, 4) for one in torch.split(weight, 1)])
            self._keep(layer, **{f"{name}_weight": packed, f"{name}_weight_scale": scale.contiguous()})


class Fp8WeightExperts(WeightOnlyExperts):
    """Weights of ``fp8``; see :class:`.layers.Fp8WeightLayer`."""

    fl_float8 = True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Expand scales to one for each column of each expert, or each group of a column."""
        for name in NAMES:
            weight, scale = (value.data for value in self.weight_of(layer, name))
            scales = self._scales(scale, weight.shape[1])
            self._keep(layer, **{f"{name}_weight": weight.contiguous(), f"{name}_weight_scale": scales})

    def _scales(self, stored: Tensor, columns: int) -> Tensor:
        return orders.scale_of_experts(stored, columns).to(self.fl_dtype)


class Mxfp8Experts(Fp8WeightExperts):
    """Weights with a power of two for each group; see :class:`.layers.Mxfp8Layer`."""

    def _scales(self, stored: Tensor, columns: int) -> Tensor:
        return orders.scales_of_bytes(stored, self.fl_dtype)


class Float4Experts(WeightOnlyExperts):
    """Weights of e2m1; see :class:`.layers.Float4Layer`.

    Args:
        names: the format's names, after ``w13_``.
        of_weight: whether a weight has a scale in addition to those of groups.
    """

    def __init__(self, names: Float4Names, of_weight: bool) -> None:
        super().__init__()
        self._names, self._of_weight = names, of_weight
        self.fl_weights = tuple(f"{name}_{part}" for name in NAMES for part in (names.weight, "weight_scale"))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the bytes, and merge the scales of rows or weights into those of groups."""
        for name in NAMES:
            weight, scale = self.weight_of(layer, name)
            factor: Tensor | None = None
            if self._of_weight:
                factor = self._factors(layer, f"{name}_{self._names.of_weight}", weight.shape[1])
            if self.fl_rounding == NVFP4:
                owner = f"{name}_{self._names.of_rows}"
                of_rows = self._factors(layer, owner, 2)
                if not bool((of_rows == of_rows[:, :1]).all()):
                    raise ValueError(f"'{owner}' differs for the gate and for 'up' of an expert ({self.fl_scope})")
                factor = of_rows[:, :1] if factor is None else factor * of_rows[:, :1]
                setattr(layer, owner, nn.Parameter(1 / of_rows[:, 0, 0], requires_grad=False))
            scales, stored = orders.scales_of_bytes(scale.data, self.fl_dtype, factor), weight.data.view(FP4)
            if factor is None and reencoding.asked():
                self._check(f"{name}_weight_scale", scales)
                stored, scales = reencoding.in_blocks(f"{self.fl_scope}.{name}_{self._names.weight}", stored, scales)
            self._keep(layer, **{f"{name}_{self._names.weight}": stored, f"{name}_weight_scale": scales})

    def _factors(self, layer: Any, owner: str, columns: int) -> Tensor:
        """Return and remove a layer's common factors of each expert's scales: ``[experts, columns, 1]``."""
        factor = orders.scale_of_experts(getattr(layer, owner).data, columns)
        self._check_factor(owner, factor)
        setattr(layer, owner, None)
        return factor.reciprocal() if self._names.divides else factor

    def _last(self, layer: Any) -> tuple[Any, ...]:
        factors = (getattr(layer, f"{name}_{self._names.of_rows}", None) for name in NAMES)
        return *factors, self.fl_rounding


OPERATORS = (ScaledExperts.fl_operator, PackedExperts.fl_operator)

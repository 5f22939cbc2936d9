"""A quantization scheme: a checkpoint's settings for a layer's weights and inputs, and the layer that computes it.

Both hosts read a checkpoint's settings into a :class:`Scheme`, call :func:`served` for the kind of layer that computes
it, or for the error that refuses it, and make the parameters. A new scheme is a :class:`Kind`, its place in
:func:`kind_of`, and one class per host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

from . import orders, remedies

CHANNEL = "channel"
"""A scale for each column of a weight."""
TENSOR = "tensor"
"""One scale for a whole weight or input."""
GROUP = "group"
"""A scale for each group of a row's elements."""
TENSOR_GROUP = "tensor_group"
"""A scale for each group of a row's elements, times one for the whole weight."""
BLOCK = "block"
"""A scale for each block of rows and columns."""
TOKEN = "token"
"""A scale for each row of an input."""
BITS = (4, 8)
"""Bits of packed weights in ``compressed-tensors``."""
GPTQ_BITS = (2, 3, 4, 8)
"""Bits of packed weights in ``gptq``."""
MX_GROUP = 32
"""Elements that share a scale, a power of two, in MXFP4 and MXFP8 (OCP Microscaling Formats 1.0)."""
PACKED_FORM = "pack-quantized"
STORED_FORM = "int-quantized"
MXFP4_FORM, NVFP4_FORM, MXFP8_FORM = "mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"
EXPRESSION = "re:"
"""The prefix of a rule that is a regular expression; other rules are names."""
LEFT = "not quantized"
"""The answer of a checkpoint's rules for a layer that is not quantized."""


class Refused(Protocol):
    """A host's error for an unserved feature of a checkpoint; ``remedy``: a feature that works."""

    def __call__(self, what: str, remedy: str = "") -> Exception: ...


@dataclass(frozen=True)
class Numbers:
    """The storage format of weights or inputs.

    Args:
        kind: ``int`` or ``float``.
        per: the unit that shares a scale: :data:`CHANNEL`, or another of these names.
        group: elements of a row that share a scale; -1 for the whole row.
        block: rows and columns of a block.
        symmetric: whether there are no zero points.
        dynamic: whether scales are computed from the numbers, not stored.
    """

    bits: int
    kind: str
    per: str
    group: int = -1
    block: tuple[int, int] = (0, 0)
    symmetric: bool = True
    dynamic: bool = False

    def __str__(self) -> str:
        known = {GROUP: f"groups of {self.group}", BLOCK: "blocks of {} x {}".format(*self.block)}
        per = {**known, TENSOR_GROUP: f"{known[GROUP]} and tensor"}.get(self.per, self.per)
        return f"{self.bits} bits ({self.kind}, {per}{'' if self.symmetric else ', zero points'})"


@dataclass(frozen=True)
class Scheme:
    """A checkpoint's settings for one layer.

    Args:
        method: the format's name in checkpoints.
        inputs: ``None`` for unquantized inputs.
        form: the storage format of ``compressed-tensors``.
        reordered: whether each column has its own group index (``desc_act``, ``actorder``).
    """

    method: str
    weights: Numbers
    inputs: Numbers | None = None
    form: str = ""
    reordered: bool = False

    @property
    def given(self) -> bool:
        """Whether the checkpoint has input scales."""
        return self.inputs is not None and not self.inputs.dynamic

    @property
    def rounding(self) -> str:
        """Return the format to which inputs are rounded for weights in their stored form; empty for none."""
        if self.inputs is None:
            return ""
        return ROUNDINGS.get((self.inputs.bits, self.inputs.kind, self.inputs.per), "")

    def __str__(self) -> str:
        return str(self.weights)


ROUNDINGS: Mapping[tuple[int, str, str], str] = MappingProxyType(
    {
        (4, "float", GROUP): "mxfp4",
        (4, "float", TENSOR_GROUP): "nvfp4",
        (8, "float", GROUP): "mxfp8",
        (8, "int", TOKEN): "int8",
    }
)
"""Bits, kind and input scales → a name of :data:`~fl_dispatch.ops.quantization.ROUNDINGS`."""


class Kind(Enum):
    """Kinds of layers: the numbers that they multiply, and for packed weights the checkpoint's order."""

    INT8 = "int8"
    FP8 = "fp8"
    FP8_WEIGHT = "fp8, for inputs as they are"
    FP8_BLOCKS = "fp8 in blocks"
    COMPRESSED = "packed by compressed-tensors"
    GPTQ = "packed by gptq"
    AWQ = "packed by awq"
    GPT_OSS = "mxfp4 of gpt-oss"
    INT4 = "int4, a number in a byte"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    MXFP8 = "mxfp8"


_NVFP4 = Kind.NVFP4, Numbers(4, "float", TENSOR_GROUP, 16)
_MXFP8 = Kind.MXFP8, Numbers(8, "float", GROUP, MX_GROUP)
FLOATS: Mapping[str, tuple[Kind, Numbers]] = MappingProxyType(
    {
        MXFP4_FORM: (Kind.MXFP4, Numbers(4, "float", GROUP, MX_GROUP)),
        NVFP4_FORM: _NVFP4,
        "NVFP4": _NVFP4,
        "W4A16_NVFP4": _NVFP4,
        MXFP8_FORM: _MXFP8,
        "MXFP8": _MXFP8,
    }
)
"""Float formats with groups → the kind of layers, and the weights; inputs of the same format have dynamic scales."""
INT8_ROWS = Numbers(8, "int", TOKEN, dynamic=True)
"""Inputs for integer weights with groups."""


@dataclass(frozen=True)
class Float4Names:
    """A format's names for the parts of an e2m1 weight.

    Args:
        weight: its bytes.
        of_weight: the scale of the whole weight, in NVFP4.
        of_rows: the scale of its inputs.
        divides: whether both divide instead of multiplying.
    """

    weight: str
    of_weight: str
    of_rows: str
    divides: bool


FLOAT4_NAMES: Mapping[str, Float4Names] = MappingProxyType(
    {
        "compressed-tensors": Float4Names("weight_packed", "weight_global_scale", "input_global_scale", divides=True),
        "modelopt": Float4Names("weight", "weight_scale_2", "input_scale", divides=False),
        "mxfp4": Float4Names("weight", "", "", divides=False),
    }
)
"""Method → the names."""


def compressed(weights: Any, inputs: Any, form: str) -> Scheme | str:
    """Return a scheme of ``compressed-tensors``, or :data:`LEFT`.

    Args:
        weights, inputs: the library's ``QuantizationArgs``; ``None`` if not quantized.
        form: the storage format.
    """
    if weights is None:
        return LEFT
    reordered = _word(weights.actorder) in orders.REORDERED
    rows = None if inputs is None else _numbers(inputs)
    return Scheme("compressed-tensors", _numbers(weights), rows, form, reordered)


def in_order(targets: Iterable[str]) -> list[str]:
    """Return the targets of ``compressed-tensors`` in the library's order: the first that covers a layer counts.

    The order is that of ``match_targets`` in ``utils/match.py``.
    """
    return sorted(targets, key=lambda target: (EXPRESSION in target, target))


def of_experts(products: Sequence[Scheme | str], prefix: str, refused: Refused) -> Scheme | str:
    """Return the scheme of a layer's experts, by those of their products; raise by ``refused`` if these differ."""
    if any(product != products[0] for product in products):
        raise refused(f"experts with products that differ in their scheme ({prefix})")
    return products[0]


def _numbers(args: Any) -> Numbers:
    down, across = args.block_structure or (0, 0)
    return Numbers(
        bits=args.num_bits,
        kind=str(_word(args.type)),
        per=str(_word(args.strategy)),
        group=args.group_size or -1,
        block=(down, across),
        symmetric=args.symmetric,
        dynamic=bool(args.dynamic),
    )


def _word(value: Any) -> Any:
    return getattr(value, "value", value)


def fp8(activation_scheme: str, block: Any) -> Scheme:
    """Return a scheme of ``fp8``; ``block``: rows and columns of a block, or ``None`` for one scale per weight."""
    down, across = block or (0, 0)
    static = activation_scheme == "static"
    rows = Numbers(8, "float", GROUP if block else TENSOR if static else TOKEN, across or -1, dynamic=not static)
    return Scheme("fp8", Numbers(8, "float", BLOCK if block else TENSOR, block=(down, across)), rows)


def gptq(said: Mapping[str, Any]) -> Scheme:
    """Return a scheme of ``gptq``; ``said``: ``bits``, ``group_size``, ``desc_act`` and ``sym`` of a layer."""
    group = said["group_size"]
    weights = Numbers(said["bits"], "int", GROUP if group > 0 else CHANNEL, group, symmetric=bool(said["sym"]))
    return Scheme("gptq", weights, reordered=bool(said["desc_act"]) and group != -1)


def gptq_rule(usual: Mapping[str, Any], dynamic: Mapping[str, Any]) -> Callable[[str], Scheme | str | None]:
    """Return the rules of ``gptq``: a layer's name → its scheme, :data:`LEFT`, or ``None`` if no ``dynamic`` rule fits.

    Expressions are matched from the start of a name.

    Args:
        usual: see :func:`gptq`.
        dynamic: expression → the values that differ; one after ``-:`` names unquantized layers.
    """

    def rule(name: str) -> Scheme | str | None:
        for pattern, changed in dynamic.items():
            if re.match(pattern.removeprefix("-:").removeprefix("+:"), name):
                return LEFT if pattern.startswith("-:") else gptq({**usual, **changed})
        return None

    return rule


def awq(bits: int, group: int, zero_point: bool) -> Scheme:
    """Return a scheme of ``awq``."""
    return Scheme("awq", Numbers(bits, "int", GROUP if group > 0 else CHANNEL, group, symmetric=not zero_point))


def awq_rule(left: Sequence[str]) -> Callable[[str], Scheme | str | None]:
    """Return the rules of ``awq``: a layer's name → :data:`LEFT`, or ``None`` if no rule names it.

    Args:
        left: ``modules_to_not_convert``: parts of names, or after :data:`EXPRESSION` a pattern from the start.
    """
    expressions = [re.compile(entry.removeprefix(EXPRESSION)) for entry in left if entry.startswith(EXPRESSION)]
    parts = [entry for entry in left if not entry.startswith(EXPRESSION)]

    def rule(name: str) -> Scheme | str | None:
        named = any(part in name for part in parts) or any(one.match(name) for one in expressions)
        return LEFT if named else None

    return rule


def modelopt_algorithm(config: Mapping[str, Any]) -> str:
    """Return the number format's name in a ``modelopt`` configuration, in either of its two forms."""
    section = config.get("quantization") or config
    return str(section.get("quant_algo", "")).upper()


def modelopt(algorithm: str, group: int) -> Scheme:
    """Return a scheme of ``modelopt``; ``group``: elements that share a scale, in NVFP4."""
    if algorithm == "FP8":
        one = Numbers(8, "float", TENSOR)
        return Scheme("modelopt", one, one)
    if algorithm == "MXFP8":
        return Scheme("modelopt", _MXFP8[1], replace(_MXFP8[1], dynamic=True), algorithm)
    weights = Numbers(4, "float", TENSOR_GROUP, group)
    inputs = None if algorithm.startswith("W4A16") else replace(weights, dynamic=True)
    return Scheme("modelopt", weights, inputs, algorithm)


def mxfp4() -> Scheme:
    """Return the scheme of gpt-oss's experts, the only layers that ``mxfp4`` quantizes."""
    return Scheme("mxfp4", FLOATS[MXFP4_FORM][1])


def served(scheme: Scheme, prefix: str, refused: Refused, experts: bool = False) -> Kind:
    """Return the kind of layer that computes a scheme.

    Args:
        scheme: the layer's scheme.
        prefix: the layer's name; empty for a problem of the whole checkpoint.
        refused: the host's error.
        experts: whether these are a layer's experts.

    Raises:
        Exception: by ``refused``, in one sentence, if no kind does.
    """
    place, method, weights = f" ({prefix})" if prefix else "", scheme.method, scheme.weights
    bits = weights.bits
    if method == "gptq" and bits not in GPTQ_BITS:
        raise refused(f"'gptq' with {bits} bits{place}", remedies.BITS)
    if method == "gptq" and not weights.symmetric:
        raise refused(f"'gptq' with zero points{place}", remedies.ZERO_POINTS)
    if method == "gptq" and scheme.reordered:
        raise refused(f"'gptq' with desc_act in groups{place}", remedies.COLUMNS)
    if method == "awq" and weights.symmetric:
        raise refused(f"'awq' without zero points{place}")
    if method == "awq" and experts and weights.per == CHANNEL:
        raise refused(f"experts quantized by 'awq' without groups{place}")
    kind = kind_of(scheme, experts)
    if kind is None:
        rows = "as they are" if scheme.inputs is None else f"of {scheme.inputs}"
        given = " with scales of the checkpoint" if scheme.given else ""
        form = f"'{scheme.form}' of " if scheme.form else ""
        owner = "experts with weights" if experts else "weights"
        raise refused(f"{owner} of {weights} for inputs {rows}{given} in {form}{method}{place}")
    return kind


def kind_of(scheme: Scheme, experts: bool = False) -> Kind | None:
    """Return the kind of layer for a scheme, or ``None``."""
    weights, inputs, form = scheme.weights, scheme.inputs, scheme.form
    if scheme.method in ("gptq", "awq"):
        return Kind(f"packed by {scheme.method}")
    if scheme.method == "mxfp4":
        return Kind.GPT_OSS if experts else None
    if form in FLOATS:
        kind, numbers = FLOATS[form]
        fits = inputs is None or inputs == replace(numbers, dynamic=True)
        return kind if weights == numbers and fits else None
    integers = weights.kind == "int" and weights.per in (CHANNEL, GROUP) and not weights.dynamic
    if form == PACKED_FORM:
        bits = BITS if scheme.method == "compressed-tensors" else GPTQ_BITS  # hosts may not know the format
        fits = inputs in (None, INT8_ROWS)
        return Kind.COMPRESSED if integers and weights.bits in bits and fits else None
    if form == STORED_FORM and weights.bits == 4:
        return Kind.INT4 if integers and weights.symmetric and inputs == INT8_ROWS else None
    same = inputs is None or (inputs.bits == 8 and inputs.kind == weights.kind and inputs.symmetric)
    if not same or weights.bits != 8 or not weights.symmetric or weights.dynamic:
        return None
    if weights.per == BLOCK:
        down, across = weights.block
        whole = weights.kind == "float" and inputs is not None and not scheme.given and down == across == inputs.group
        return Kind.FP8_BLOCKS if whole else None
    if weights.per not in (CHANNEL, TENSOR) or weights.kind not in ("int", "float"):
        return None
    if inputs is None:
        return Kind.FP8_WEIGHT if weights.kind == "float" else None
    return Kind.FP8 if weights.kind == "float" else Kind.INT8

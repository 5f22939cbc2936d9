"""An operator: one declaration, the single source for everything derived from it.

An operator is declared by its reference, a function in plain PyTorch with the operator's signature and docstring.
Fields hold the rest: the arguments that may be overwritten, how a layer supplies arguments, the fake (meta) function,
the modes in which it may run, tolerances, sample inputs, and the work of a call. Registration checks, adapters, bound
operators, ``torch.library`` views, the reference backend, verification, benchmarks and the documentation table are
derived from it.
"""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic

import torch
from typing_extensions import TypeVar

from .named import of_arguments


class Access(enum.Enum):
    """How a call uses an argument that it writes."""

    UPDATE = "update"  # overwritten, and its old value matters: a retry needs a copy
    OUTPUT = "output"  # fully written, whatever its old value: a retry needs no copy
    STATE = "state"  # partly written and too large to copy (a KV cache): no retry


class Mode(enum.Enum):
    """The ways in which an operator may run (see docs/evidence/core.md, Compiled code)."""

    INLINE = "inline"
    OPAQUE = "opaque"
    EAGER = "eager"


@dataclass(frozen=True)
class Write:
    """An argument that a call may write.

    Args:
        access: how the call uses it.
        given: another parameter; the argument is written only if this one is neither ``None`` nor ``False``.
    """

    access: Access
    given: str | None = None


@dataclass(frozen=True)
class SmallState:
    """A second run of a call that writes a state too large to copy.

    Both functions name the parameters that they read, except hints.

    Args:
        own: the arguments of the second run that differ from the call's, by name: a separate state, as large as the
            part of the state that the call writes.
        written: the part of the state that a call has written, in the same form for both runs.
    """

    own: Callable[..., Mapping[str, Any]]
    written: Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class LayerForm:
    """How a layer object supplies arguments: parameter name → attribute of the layer.

    The layer form of a call is ``(obj, *the parameters that the layer does not supply)``, in the declaration's order.
    An attribute that the layer lacks leaves the parameter at its default.
    """

    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted error against the float64 reference: ``|error| <= atol + rtol * |expected|``."""

    rtol: float
    atol: float


@dataclass(frozen=True)
class Work:
    """The least work of one call, for judging how near to the floor an implementation is.

    Args:
        bytes_moved: bytes read and written once.
        operations: floating-point operations.
    """

    bytes_moved: int
    operations: int


@dataclass(frozen=True)
class Workload:
    """The facts of a call that a conditional choice may read.

    Args:
        dtype: dtype of the leading tensor.
        tokens: number of tokens in the call.
        phase: ``"prefill"`` or ``"decode"`` if the operator can tell, else ``None``.
    """

    dtype: torch.dtype | None
    tokens: int
    phase: str | None = None


@dataclass(frozen=True)
class Sample:
    """One generated input.

    Args:
        label: its special property, such as ``"decode, 32 tokens"``.
        args: positional arguments in the declaration's order.
        serving: whether it is a realistic serving shape, not a corner case.
    """

    label: str
    args: tuple[Any, ...]
    serving: bool = True


Samples = Callable[[torch.dtype, torch.device, torch.Generator], Iterator[Sample]]


@dataclass(frozen=True)
class Place:
    """The place and dtype in which benchmarks make arguments.

    On the ``meta`` device they take no memory and no time: :attr:`Operator.work` needs their shapes only.
    """

    dtype: torch.dtype
    device: torch.device

    @property
    def index_device(self) -> torch.device:
        """Return the device of index tensors: never ``meta``, because work depends on their values."""
        return torch.device("cpu") if self.device.type == "meta" else self.device

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers around zero."""
        dtype = dtype or self.dtype
        if self.device.type == "meta":
            return torch.empty(shape, device=self.device, dtype=dtype)
        return torch.randn(shape, device=self.device, dtype=dtype).mul_(scale)

    def floating(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a tensor of :attr:`index_device` to this place and dtype."""
        if self.device.type == "meta":
            return torch.empty(tensor.shape, device=self.device, dtype=self.dtype)
        return tensor.to(self.device, self.dtype)


@dataclass(frozen=True)
class Shape:
    """One shape that a benchmark measures.

    Args:
        label: its difference from the operator's other shapes, such as ``with residual``.
        tokens: new tokens of the call.
        width: the operator's width: hidden size, or the context's length for attention.
        make: makes arguments in new memory.
    """

    label: str
    tokens: int
    width: int
    make: Callable[[Place], tuple[Any, ...]]


Shapes = Callable[[Sequence[int], Sequence[int]], Iterator[Shape]]
"""Numbers of tokens and hidden sizes → shapes; attention has its own shapes, up to the largest number of tokens."""

HALF_TYPES = (torch.float16, torch.bfloat16)

SEVERAL_ROUNDINGS = 1.0
"""Mean error of operators with implementations that may round intermediates to the half type; terms may cancel."""

STANDARD_TOLERANCE: Mapping[torch.dtype, Tolerance] = MappingProxyType(
    {
        torch.float64: Tolerance(1e-12, 1e-12),
        torch.float32: Tolerance(2e-5, 2e-6),
        torch.float16: Tolerance(2e-3, 1e-3),
        torch.bfloat16: Tolerance(1.6e-2, 1e-2),
    }
)


FEW_TERMS = 128
"""Terms of a float32 sum that stays within the absolute part of a tolerance, by ten standard deviations."""


NARROW_SUM = 2.0**-14 / 32
"""The error that a term of an fp8 sum may add to a result near one: a Hopper GPU adds 32 terms at a time to a number of
14 bits, and truncates the rest (DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2)."""


def leading_tensor(args: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the first tensor among positional arguments."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg
    return None


def rows_workload(*args: Any) -> Workload:
    """Return the workload of an operator on ``[..., hidden]``, with one token per row."""
    tensor = leading_tensor(args)
    if tensor is None or tensor.dim() == 0:
        return Workload(None if tensor is None else tensor.dtype, 0)
    return Workload(tensor.dtype, tensor.shape[:-1].numel())


def tokens_workload(x: torch.Tensor, *args: Any) -> Workload:
    """Return the workload of an operator with one token per row of its first tensor."""
    return Workload(x.dtype, x.shape[0])


def decode(x: torch.Tensor, *args: Any) -> Workload:
    """Return the workload of one row per request."""
    return Workload(x.dtype, x.shape[0], "decode")


def prefill(x: torch.Tensor, *args: Any) -> Workload:
    """Return the workload of ragged sequences."""
    return Workload(x.dtype, x.shape[0], "prefill")


def slots_workload(key: torch.Tensor, slot_mapping: torch.Tensor) -> Workload:
    """Return the workload of a write to a cache."""
    return Workload(key.dtype, slot_mapping.shape[0])


def queries_workload(query: torch.Tensor, max_query_len: int) -> Workload:
    """Return the workload of attention over a cache."""
    return (decode if max_query_len == 1 else prefill)(query)


def same(x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Return a contiguous result like the first tensor."""
    return x.new_empty(x.shape)


def nothing() -> None:
    """Return no result."""


def bytes_of(*tensors: torch.Tensor | None) -> int:
    """Return the bytes of tensors, each counted once."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def row_terms(*args: Any) -> int:
    """Return the terms of a product of rows with weights: each sum has one term per element of a row."""
    tensor = leading_tensor(args)
    if tensor is None or tensor.dim() == 0 or tensor.dtype is torch.int8:  # int32 sums are exact
        return 0
    return tensor.shape[-1]


Reference = TypeVar("Reference", bound=Callable[..., Any], default=Callable[..., Any])
"""The type of an operator's reference, which keeps its signature for type checkers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator(Generic[Reference]):
    """The declaration of one operator.

    Args:
        name: its name.
        reference: the ground truth in plain PyTorch, on any device: a function with the operator's signature and
            docstring. It computes half types in float32, and float32 and float64 as they are, and ignores hints. The
            reference of a selection has no body and is never called.
        waits: whether the reference reads numbers back from the device, so that no graph can hold it.
        batch_invariant: whether rows of the reference's results do not depend on the batch, because they are copies, or
            products, sums and differences of two numbers.
        hints: its last parameters, with information that an implementation may use or ignore, such as lengths as host
            integers in addition to the tensor of lengths. A call drops hints that the implementation lacks. Their
            default is ``None``, and no choice depends on them: the kind of the arguments, opaque views, ``fake``,
            ``workload`` and ``work`` do not include them.
        later: parameters that were declared after other packages had implemented the operator. A callable without a
            signature counts as lacking them.
        writes: the arguments that a call may write; all others are only read.
        small_state: how a call that writes a state runs a second time; without it no second run is possible.
        weights: parameters that get the same tensors in every call of a model, so that implementations may prepare them
            (:mod:`fl_dispatch.weight_forms`).
        layer: the layer form; ``None`` for an operator without one.
        modes: the modes in which it may run.
        fake: computes outputs without data; ``None`` for a selection. Like ``terms``, ``narrow_terms``, ``workload``
            and ``work`` it names the parameters that it reads, or takes all in order, in both cases without hints.
        samples: generates inputs; ``None`` for a selection.
        probes: generates further inputs for verification, each chosen for a fault that samples do not show: large
            sizes, strides, NaN in memory that no call may use.
        shapes: the shapes that benchmarks measure; ``None`` for the serving samples.
        aliases: other names for it in the field.
        tolerances: accepted error for each dtype, if sums have few terms; see :meth:`tolerance`.
        terms: the number of terms in one element's sum; ``None`` if errors do not add up.
        narrow_terms: the number of these terms that matrix units may sum with fewer bits than float32 has.
        mean_error: accepted mean error of results in a half type, in units of the last place. Rounding once gives 0.25,
            rounding before a last product 0.3, arithmetic in the half type about 0.45 for a gated activation.
        workload: returns the facts of a call for conditional choices.
        phases: whether ``workload`` can tell the phase.
        work: least bytes and operations of a call.
        selection: whether it selects something (a class path) instead of computing: no reference, no torch operator, no
            bench.
    """

    name: str
    reference: Reference
    waits: bool = False
    batch_invariant: bool = False
    hints: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    writes: Mapping[str, Write] = field(default_factory=lambda: MappingProxyType({}))
    small_state: SmallState | None = None
    weights: tuple[str, ...] = ()
    layer: LayerForm | None = None
    modes: frozenset[Mode] = frozenset({Mode.EAGER})
    fake: Callable[..., Any] | None = None
    samples: Samples | None = None
    probes: Samples | None = None
    shapes: Shapes | None = None
    aliases: tuple[str, ...] = ()
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=lambda: STANDARD_TOLERANCE)
    terms: Callable[..., int] | None = None
    narrow_terms: Callable[..., int] | None = None
    mean_error: float = 0.4
    workload: Callable[..., Workload] = rows_workload
    phases: bool = False
    work: Callable[..., Work] | None = None
    selection: bool = False
    signature: inspect.Signature = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "signature", inspect.signature(self.reference))
        parameters = self.parameters
        for parameter in parameters.values():
            if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
                raise ValueError(f"operator {self.name}: parameter {parameter.name} must be an ordinary positional one")
        for name, write in self.writes.items():
            if name not in parameters or (write.given is not None and write.given not in parameters):
                raise ValueError(f"operator {self.name}: writes name a parameter that does not exist: {name}")
        if unknown := [name for name in self.weights if name not in parameters]:
            raise ValueError(f"operator {self.name}: weights name a parameter that does not exist: {unknown[0]}")
        for name in self.layer.attributes if self.layer else ():
            if name not in parameters:
                raise ValueError(f"operator {self.name}: the layer form names a parameter that does not exist: {name}")
        if self.hints:
            self._check_hints()
        operands = {name: parameters[name] for name in self.operands(tuple(parameters))}
        for helper in ("fake", "workload", "work", "terms", "narrow_terms"):
            if function := getattr(self, helper):
                object.__setattr__(self, helper, self._of_operands(helper, function, operands))
        if small := self.small_state:
            chosen = (self._of_operands("small_state", function, operands) for function in (small.own, small.written))
            object.__setattr__(self, "small_state", SmallState(*chosen))

    def _check_hints(self) -> None:
        last = tuple(self.parameters)[-len(self.hints) :]
        if last != self.hints:
            raise ValueError(f"operator {self.name}: hints must be the last parameters {last}, in order: {self.hints}")
        used = {*self.writes, *(write.given for write in self.writes.values())}
        used |= set(self.layer.attributes if self.layer else ())
        for name in self.hints:
            if self.parameters[name].default is not None:
                raise ValueError(f"operator {self.name}: the hint {name} must have the default None")
            if name in used:
                raise ValueError(f"operator {self.name}: {name} is a hint, so neither writes nor layer can name it")

    def _of_operands(
        self, helper: str, function: Callable[..., Any], operands: Mapping[str, inspect.Parameter]
    ) -> Callable[..., Any]:
        """Return a helper as a function of all arguments, which drops hints."""
        try:
            chosen = of_arguments(function, operands)
        except TypeError as error:
            raise ValueError(f"operator {self.name}: its '{helper}' does not fit: {error}") from None
        return (lambda *args: chosen(*self.operands(args))) if self.hints else chosen

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Return the parameters in order."""
        return self.signature.parameters

    @property
    def doc(self) -> str:
        """Return the docstring."""
        return inspect.getdoc(self.reference) or ""

    @property
    def summary(self) -> str:
        """Return the first line of the docstring."""
        return self.doc.partition("\n")[0]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return all arguments of a call in the declaration's order, with defaults filled in.

        Raises:
            TypeError: the arguments do not fit the signature.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}({', '.join(self.parameters)}): {error}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by name, with defaults filled in."""
        return dict(zip(self.parameters, self.bind(args, kwargs), strict=True))

    def operands(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a call without hints; ``args`` in the declaration's order."""
        return args[: len(self.parameters) - len(self.hints)]

    def second_operands(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the operands of a second run of a call, which has a small separate state (:attr:`small_state`)."""
        operands = dict(zip(self.parameters, self.operands(args), strict=False))
        assert self.small_state is not None
        return tuple({**operands, **self.small_state.own(*operands.values())}.values())

    def tolerance(self, dtype: torch.dtype, args: tuple[Any, ...]) -> Tolerance:
        """Return the accepted error of a call; ``args`` as :meth:`bind` returns them.

        The standard deviation of the error of a sum of ``n`` terms, rounded at each of them, grows with ``sqrt(n)`` (N.
        J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2), so beyond :data:`FEW_TERMS`
        the absolute part grows by the error of such a float32 sum. The rule for float64 is the same. In half types the
        absolute part grows by :data:`NARROW_SUM` for each narrow term.

        Raises:
            KeyError: no tolerance is declared for the dtype.
        """
        given = self.tolerances[dtype]
        if self.narrow_terms is not None and dtype in HALF_TYPES:
            narrow = self.narrow_terms(*args)
            given = Tolerance(given.rtol, given.atol + NARROW_SUM * narrow)
        terms = FEW_TERMS if self.terms is None else self.terms(*args)
        if terms <= FEW_TERMS:
            return given
        summed = STANDARD_TOLERANCE[torch.promote_types(dtype, torch.float32)].atol
        return Tolerance(given.rtol, given.atol + summed * (math.sqrt(terms / FEW_TERMS) - 1))

    def most_mean_error(self, args: tuple[Any, ...]) -> float:
        """Return the accepted mean error of a call's results in a half type; narrow float16 sums have larger errors."""
        narrow = self.narrow_terms is not None and self.narrow_terms(*args) > 0
        return max(SEVERAL_ROUNDINGS, self.mean_error) if narrow else self.mean_error

    def stay(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a call that are weights; ``args`` as :meth:`bind` returns them."""
        values = dict(zip(self.parameters, args, strict=True))
        return tuple(values[name] for name in self.weights if isinstance(values[name], torch.Tensor))

    def written(self, args: tuple[Any, ...]) -> dict[str, tuple[Access, torch.Tensor]]:
        """Return the tensors that this call may write, by parameter name; ``args`` as :meth:`bind` returns them."""
        values = dict(zip(self.parameters, args, strict=True))
        found = {}
        for name, write in self.writes.items():
            given = True if write.given is None else values[write.given]
            if isinstance(values[name], torch.Tensor) and given is not None and given is not False:
                found[name] = (write.access, values[name])
        return found


def operator(**declaration: Any) -> Callable[[Reference], Operator[Reference]]:
    """Declare an operator by decorating its reference; the keywords are the fields of :class:`Operator`."""

    def declare(reference: Reference) -> Operator[Reference]:
        return Operator(name=reference.__name__, reference=reference, **declaration)

    return declare

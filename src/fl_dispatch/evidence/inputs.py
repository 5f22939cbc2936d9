"""The inputs of one operator in one dtype, with the reference's results in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..devices import device_of
from ..errors import DispatchError
from ..manager import OpManager
from ..ops import OPERATORS, Access, Operator, Sample, Tolerance
from ..ops.results import flat
from ..run.direct import direct_function
from ..settings.names import suggestion
from ..types import BackendImplKind
from .arguments import Arguments, described, double, guarded

AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → a type with all operations."""
Named = list[tuple[str, Tensor | None]]


def declared(op_name: str) -> Operator:
    """Return the declaration of an operator that computes something.

    Raises:
        DispatchError: there is none.
    """
    operator = OPERATORS.get(op_name)
    if operator is None:
        raise DispatchError(f"operator '{op_name}' is not declared{suggestion(op_name)}")
    if operator.selection or operator.samples is None:
        raise DispatchError(f"operator '{op_name}' has no samples, so there is nothing to run it on")
    return operator


@dataclass
class Input:
    """One input, between guards, with NaN or the smallest integer in arguments that a call must write completely.

    Args:
        label: the input's special feature.
        serving: a realistic serving shape.
        args: all arguments in the declaration's order.
        tolerance: the accepted error of results.
        operator: the operator that takes it.
        oracle: the reference.
    """

    label: str
    serving: bool
    args: Arguments
    tolerance: Tolerance
    operator: Operator
    oracle: Callable[..., Any] = field(repr=False)
    _expected: list[Tensor | None] | None = field(default=None, repr=False)
    _rewritten: Input | None = field(default=None, repr=False)

    @property
    def expected(self) -> list[Tensor | None]:
        """Return the reference's results in float64, computed once."""
        if self._expected is None:
            device = next((arg.device for arg in self.args if isinstance(arg, Tensor)), torch.device("cpu"))
            if not device_of(device.type).float64:
                device = torch.device("cpu")
            given = tuple(double(arg, device) for arg in self.args)
            self._expected = [tensor for _, tensor in outputs(self.operator, given, self.oracle(*given))]
        return self._expected

    @property
    def rewritten(self) -> Input:
        """Return this input with other weights, reversed along the first and last dimension; made once."""
        if self._rewritten is None:
            others = {id(weight): _reversed(weight) for weight in self.operator.stay(self.args)}
            args = tuple(others.get(id(value), value) for value in self.args)
            label = f"{self.label}, its weights written"
            self._rewritten = Input(label, self.serving, args, self.tolerance, self.operator, self.oracle)
        return self._rewritten

    @property
    def description(self) -> str:
        """Return its arguments in words."""
        return described(list(self.operator.parameters), self.args)


def _reversed(weight: Tensor) -> Tensor:
    whole = weight.detach().contiguous()
    if not whole.dim():
        return whole
    as_bits = whole.view(AS_BITS[whole.element_size()])  # PyTorch cannot reverse fp8
    return as_bits.flip(sorted({0, whole.dim() - 1})).view(weight.dtype)


def outputs(operator: Operator, given: Arguments, result: Any) -> Named:
    """Return a call's outputs with names: its results, and the state that it wrote."""
    found: Named = [(f"output {index}", tensor) for index, tensor in enumerate(flat(result))]
    for name, (access, tensor) in operator.written(given).items():
        if access is Access.STATE:
            found.append((f"'{name}'", tensor))
    return found


class Inputs:
    """The inputs of one operator; all implementations can share them, because every call gets a copy.

    Args:
        manager: the manager with the reference in its registry.
        op_name: the operator.
        dtype, device, seed: settings of the generated inputs.
        samples: replace the declaration's samples and probes.
        probes: whether the declaration's probes are among them.
        label: only inputs with this in their label.

    Raises:
        DispatchError: the operator is not declared, has no samples or no reference, or no label contains that.
    """

    def __init__(
        self,
        manager: OpManager,
        op_name: str,
        dtype: torch.dtype,
        device: torch.device,
        *,
        seed: int = 0,
        samples: Iterable[Sample] | None = None,
        probes: bool = True,
        label: str = "",
    ) -> None:
        self.operator, self.dtype, self.seed = declared(op_name), dtype, seed
        self._oracle = _oracle(manager, self.operator)
        made = _generated(self.operator, dtype, device, seed, probes) if samples is None else samples
        self._inputs = [self._input(sample) for sample in made if label in sample.label]
        if label and not self._inputs:
            raise DispatchError(f"no input of '{op_name}' has a label with '{label}' in it")

    def _input(self, sample: Sample) -> Input:
        operator, args = self.operator, _poisoned(self.operator, sample)
        is_declared = self.dtype in operator.tolerances
        tolerance = operator.tolerance(self.dtype, args) if is_declared else Tolerance(0.0, 0.0)
        return Input(sample.label, sample.serving, args, tolerance, operator, self._oracle)

    def compute(self) -> None:
        """Compute the reference's results for each input now, rather than on demand."""
        for given in self._inputs:
            assert given.expected is not None

    def __iter__(self) -> Iterator[Input]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)


def _generated(
    operator: Operator, dtype: torch.dtype, device: torch.device, seed: int, probes: bool
) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(seed)
    assert operator.samples is not None
    yield from operator.samples(dtype, device, generator)
    if probes and operator.probes is not None:
        yield from operator.probes(dtype, device, generator)


def _poisoned(operator: Operator, sample: Sample) -> Arguments:
    args = guarded(operator.bind(sample.args, {}))
    for access, tensor in operator.written(args).values():
        if access is Access.OUTPUT:
            tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
    return args


def _oracle(manager: OpManager, operator: Operator) -> Callable[..., Any]:
    for impl in manager.registry.get_implementations(operator.name):
        if impl.kind is BackendImplKind.REFERENCE:
            return direct_function(manager.state, impl)
    raise DispatchError(f"operator '{operator.name}' has no reference to verify against")

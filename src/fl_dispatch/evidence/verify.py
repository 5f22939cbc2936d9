"""Is an implementation right? Its results on the operator's samples against the reference in float64.

Beside the numbers: repeated calls give the same bits, arguments that must only be read are unchanged, memory beside
views too, every output element is written, and outputs have the declared shape, dtype and strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..devices import device_of
from ..errors import DispatchError
from ..manager import OpManager
from ..ops import OPERATORS, Access, Operator, Sample, Tolerance
from ..run.plan import direct_function
from ..types import BackendImplKind, OpImpl
from .arguments import Arguments, changed, copied, double, meta, poisoned_memory, same_bits

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Deviation:
    """The largest error that was found.

    Args:
        share: of the tolerance; above 1 it is too large.
        error, expected: at that element.
        where: the output and the element, such as ``output 0 at [3, 17]``.
        sample: the input's label.
    """

    share: float
    error: float
    expected: float
    where: str
    sample: str


@dataclass
class Verification:
    """What verifying one implementation in one dtype found.

    Args:
        op_name, impl_id, dtype: what was verified.
        samples: how many inputs were run.
        declined: the other inputs, label → why the implementation does not take them.
        worst: the largest error, or ``None`` where nothing was compared.
        tolerance: what is accepted.
        problems: what is wrong, one sentence each, beginning with the sample's label.
    """

    op_name: str
    impl_id: str
    dtype: str
    tolerance: Tolerance
    samples: int = 0
    declined: dict[str, str] = field(default_factory=dict)
    worst: Deviation | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """``right``, ``wrong``, or ``nothing to run`` when it declines every input."""
        return "wrong" if self.problems else "right" if self.samples else "nothing to run"

    def as_data(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "verdict": self.verdict}


def verify(
    manager: OpManager,
    impl: OpImpl,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    repeats: int = 3,
    samples: Iterable[Sample] | None = None,
) -> Verification:
    """Verify one registered implementation.

    Args:
        manager: whose registry holds it, and the reference.
        impl: the implementation. Unless it declares ``{"deterministic": False}``, every call must give the same bits.
        dtype: of the inputs.
        device: where it runs.
        seed: of the inputs.
        repeats: calls for each input; the first one finds new memory filled with NaN.
        samples: other inputs than the declaration's.

    Raises:
        DispatchError: the operator is not declared, has no samples or no reference.
    """
    operator = declared(impl.op_name)
    oracle = _oracle(manager, operator)
    if samples is None:
        assert operator.samples is not None
        samples = operator.samples(dtype, device, torch.Generator().manual_seed(seed))
    tolerance = operator.tolerances.get(dtype, Tolerance(0.0, 0.0))
    found = Verification(impl.op_name, impl.impl_id, str(dtype).removeprefix("torch."), tolerance)
    function = direct_function(manager.state, impl)
    for sample in samples:
        args = _poisoned(operator, operator.bind(sample.args, {}))
        refusal = True if impl.supports is None else impl.supports(*copied(operator.operands(args)))
        if refusal is not True:
            found.declined[sample.label] = refusal or "its 'supports' says no"
            continue
        deterministic = bool(impl.properties.get("deterministic", True))
        _verify_sample(found, operator, function, oracle, sample.label, args, repeats, deterministic)
    return found


def declared(op_name: str) -> Operator:
    """The declaration of an operator that computes something.

    Raises:
        DispatchError: there is none.
    """
    operator = OPERATORS.get(op_name)
    if operator is None or operator.selection or operator.samples is None:
        why = "is not declared" if operator is None else "has no samples"
        raise DispatchError(f"operator '{op_name}' {why}, so there is nothing to run it on")
    return operator


def _oracle(manager: OpManager, operator: Operator) -> Callable[..., Any]:
    for impl in manager.registry.get_implementations(operator.name):
        if impl.kind is BackendImplKind.REFERENCE:
            return direct_function(manager.state, impl)
    raise DispatchError(f"operator '{operator.name}' has no reference to verify against")


def _poisoned(operator: Operator, args: Arguments) -> Arguments:
    """The arguments with NaN in those that a call must write completely."""
    args = copied(args)
    for access, tensor in operator.written(args).values():
        if access is Access.OUTPUT:
            tensor.fill_(math.nan)
    return args


def _verify_sample(
    found: Verification,
    operator: Operator,
    function: Callable[..., Any],
    oracle: Callable[..., Any],
    label: str,
    args: Arguments,
    repeats: int,
    deterministic: bool,
) -> None:
    names, expected, first = list(operator.parameters), None, None
    for repeat in range(repeats):
        given = copied(args)
        try:
            if repeat == 0:
                with poisoned_memory():
                    result = function(*given)
            else:
                result = function(*given)
        except NotImplementedError as error:
            found.declined[label] = str(error) or "it raised NotImplementedError"
            return
        except Exception as error:  # a stranger's code: whatever it raises is the finding
            found.problems.append(f"{label}: it raised {type(error).__name__}: {error}")
            return
        if any(not isinstance(output, Tensor | None) for output in _flat(result)):
            found.problems.append(f"{label}: it returns something that is no tensor: {type(result).__name__}")
            return
        outputs = _outputs(operator, given, result)
        outputs = [(name, None if output is None else output.clone()) for name, output in outputs]
        tensors = [output for _, output in outputs if output is not None]
        touched = changed(names, args, given, list(operator.written(given)))
        if touched:
            found.problems.append(f"{label}: it changes {', '.join(touched)}, which it must only read")
            return
        if first is None:
            first = tensors
            found.samples += 1
            if problem := _misshapen(operator, args, result):
                found.problems.append(f"{label}: {problem}")
                return
            expected = _expected(operator, oracle, args)
            if strays := _strays(operator, args, outputs, expected):
                found.problems.append(f"{label}: {strays}")
                return
        elif deterministic and not same_bits(first, tensors):
            found.problems.append(f"{label}: it gives other bits for the same input in call {repeat + 1}")
            return
        if expected is not None and (repeat == 0 or not deterministic):
            _compare(found, label, outputs, expected)


def _outputs(operator: Operator, given: Arguments, result: Any) -> list[tuple[str, Tensor | None]]:
    """What a call computed, with names: its results, and the state that it wrote."""
    outputs = [(f"output {index}", tensor) for index, tensor in enumerate(_flat(result))]
    for name, (access, tensor) in operator.written(given).items():
        if access is Access.STATE:
            outputs.append((f"'{name}'", tensor))
    return outputs


def _flat(result: Any) -> list[Tensor | None]:
    if result is None:
        return []
    return list(result) if isinstance(result, tuple | list) else [result]


def _expected(operator: Operator, oracle: Callable[..., Any], args: Arguments) -> list[Tensor | None]:
    device = next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu"))
    if not device_of(device.type).float64:  # then the reference runs on the CPU
        device = torch.device("cpu")
    given = tuple(double(arg, device) for arg in args)
    return [tensor for _, tensor in _outputs(operator, given, oracle(*given))]


def _strays(
    operator: Operator, args: Arguments, outputs: list[tuple[str, Tensor | None]], expected: list[Tensor | None]
) -> str:
    """Which state was changed where the reference leaves it alone; empty if none was."""
    before = {
        f"'{name}'": tensor for name, (access, tensor) in operator.written(args).items() if access is Access.STATE
    }
    for (name, output), wanted in zip(outputs, expected, strict=True):
        if output is not None and wanted is not None and name in before:
            old = before[name]
            untouched = (wanted == double(old, wanted.device)).to(output.device)
            strays = int((untouched & (output != old)).sum())
            if strays:
                return f"it changes {strays} elements of {name} that the call does not address"
    return ""


def _misshapen(operator: Operator, args: Arguments, result: Any) -> str:
    """How the outputs differ from the declared fake's in number, dtype, shape or strides; empty if they do not."""
    assert operator.fake is not None
    wanted, got = _flat(operator.fake(*map(meta, args))), _flat(result)
    if len(wanted) != len(got):
        return f"it returns {len(got)} tensors, not {len(wanted)}"
    for index, (fake, real) in enumerate(zip(wanted, got, strict=True)):
        if (fake is None) != (real is None):
            return f"output {index} is {type(real).__name__}, not {type(fake).__name__}"
        if fake is None or real is None:
            continue
        for what in ("dtype", "shape"):
            if getattr(fake, what) != getattr(real, what):
                return f"output {index} has the {what} {_text(getattr(real, what))}, not {_text(getattr(fake, what))}"
        if fake.numel() and _strides(fake) != _strides(real):
            return f"output {index} has the strides {real.stride()}, not {fake.stride()}"
    return ""


def _strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


def _compare(
    found: Verification, label: str, outputs: list[tuple[str, Tensor | None]], expected: list[Tensor | None]
) -> None:
    for (name, output), wanted in zip(outputs, expected, strict=True):
        if output is None or wanted is None or not output.numel():
            continue
        actual = output.to(device=wanted.device, dtype=torch.float64)
        # Right without a distance: an overflow to infinity, and a row that stays NaN because no request covers it.
        exact = actual.isinf() & (wanted.to(output.dtype).double() == actual)
        exact |= wanted.isnan() & actual.isnan()
        missing = int((actual.isnan() & ~exact).sum())
        if missing:
            found.problems.append(f"{label}: {name}: {missing} of {actual.numel()} elements are not written, or NaN")
            continue
        limit = found.tolerance.atol + found.tolerance.rtol * wanted.abs()
        error = (actual - wanted).abs().masked_fill(exact, 0.0)
        share = torch.where(error == 0, 0.0, error / limit)
        place = int(share.argmax())
        where = ", ".join(map(str, _index(place, output.shape)))
        values = [float(part.flatten()[place]) for part in (share, error, wanted, actual)]
        if found.worst is None or not values[0] <= found.worst.share:
            found.worst = Deviation(values[0], values[1], values[2], f"{name} at [{where}]", label)
        if not values[0] <= 1:
            wrong = int((~(share <= 1)).sum())
            found.problems.append(
                f"{label}: {name}: {wrong} of {actual.numel()} elements are wrong, the worst at [{where}]: "
                f"{values[3]:.6g} instead of {values[2]:.6g}, {values[0]:.3g} times the tolerance"
            )


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        index.insert(0, flat % size)
        flat //= size
    return tuple(index)


def implementations(
    manager: OpManager, op_names: Sequence[str] | None = None, impl_ids: Sequence[str] | None = None
) -> list[OpImpl]:
    """Registered implementations of operators that can be verified, of some operators and with some ids if asked for.

    Raises:
        DispatchError: an operator is not declared, or nobody registered an id for any of the operators.
    """
    manager.ensure_initialized()
    names = [name for name, operator in OPERATORS.items() if operator.samples is not None]
    if op_names:
        names = [declared(name).name for name in op_names]
    found = [
        impl
        for name in names
        for impl in manager.registry.get_implementations(name)
        if not impl_ids or impl.impl_id in impl_ids
    ]
    for impl_id in impl_ids or ():
        if all(impl.impl_id != impl_id for impl in found):
            of = f" of {' or '.join(op_names)}" if op_names else ""
            raise DispatchError(f"nobody registered an implementation '{impl_id}'{of}")
    return found

"""Verification of an implementation: its results on the operator's inputs against the reference in float64.

An implementation that prepares weights is called with prepared ones, as in engines, and with plain ones.

Further checks: repeated calls give the same bits, also under load; results have separate memory; read-only arguments
are unchanged, including memory outside views; every output element is written; outputs have the declared shape, dtype
and strides; half types are rounded to nearest.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import DispatchError, text_of
from ..manager import OpManager
from ..ops import OPERATORS, Access, Sample, Tolerance
from ..ops.results import broken_promise, flat
from ..run.direct import direct_function, why_declined
from ..state import State
from ..types import OpImpl
from .arguments import (
    UNTOUCHED,
    Arguments,
    MarkedMemory,
    changed,
    poisoned_memory,
    same_bits,
    share_memory,
)
from .comparison import Deviation, Rounding, absent, compare, strays
from .compiled import compiled_function
from .inputs import Input, Inputs, Named, declared, outputs
from .load import load
from .weights import PLAIN, PREPARED, Weights, refusals_counted

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
SCHEMA = "fl-verify-1"
"""The version of the JSON, which ``verify.schema.json`` in this folder describes."""
RACE_CALLS = 500
"""Calls under load for one implementation and dtype. A fault in one call of a hundred is missed once in 150 times."""
RACE_SECONDS = 0.5
"""Seconds for these calls; a slow implementation makes fewer of them, and is tested less."""


@dataclass
class Verification:
    """The findings of verifying one implementation in one dtype.

    Args:
        op_name, impl_id, dtype: what was verified.
        tolerance: the accepted error for sums of few terms.
        how: ``direct``, or the backend of ``torch.compile`` for the calls.
        seed: the inputs' seed.
        samples: number of inputs that were run.
        prepares: whether it asked for a form of any weight.
        prepared: number of inputs that ran with weights in a prepared form (:mod:`fl_dispatch.weight_forms`).
        plain: number of inputs that ran with plain weights, or without weights.
        refused: why no form could be kept → number of weights.
        calls: number of calls under load.
        declined: the other inputs, label → why the implementation does not take them.
        worst: the largest error, or ``None`` if nothing was compared.
        rounding: errors of half-type results in units of the last place.
        mean_error: the largest bound of their mean among the inputs.
        problems: findings, one sentence each, beginning with the sample's label.
        failed: the inputs with a problem, label → the arguments in words.
    """

    op_name: str
    impl_id: str
    dtype: str
    tolerance: Tolerance
    how: str = "direct"
    seed: int = 0
    samples: int = 0
    prepares: bool = False
    prepared: int = 0
    plain: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    declined: dict[str, str] = field(default_factory=dict)
    worst: Deviation | None = None
    rounding: Rounding = field(default_factory=Rounding)
    mean_error: float = 0.0
    problems: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return ``right``, ``wrong``, or ``nothing to run`` if it declines every input."""
        return "wrong" if self.problems else "right" if self.samples else "nothing to run"

    def as_data(self) -> dict[str, Any]:
        """Return plain data; JSON has no infinity or NaN, so such a number is ``None``."""
        rounding = {"elements": self.rounding.elements, "bias": self.rounding.bias, "mean": self.rounding.mean}
        data = {**asdict(self), "rounding": rounding, "verdict": self.verdict}
        if self.worst is not None:
            held = asdict(self.worst).items()
            data["worst"] = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in held}
        return data

    def blame(self, given: Input, problem: str) -> None:
        """Record a problem of an input."""
        self.problems.append(f"{given.label}: {problem}")
        self.failed[given.label] = given.description


def verify(
    manager: OpManager,
    impl: OpImpl,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    repeats: int = 3,
    samples: Iterable[Sample] | None = None,
    inputs: Inputs | None = None,
    compiled: str = "",
    race_calls: int = RACE_CALLS,
    race_seconds: float = RACE_SECONDS,
) -> Verification:
    """Verify one registered implementation.

    Args:
        manager: the manager with the implementation and the reference in its registry.
        impl: the implementation. Unless it declares ``{"deterministic": False}``, every call must give the same bits.
        dtype: the inputs' dtype.
        device: the device of the calls.
        seed: the inputs' seed.
        repeats: calls for each input; the first one finds new memory filled with NaN.
        samples: other inputs than the declaration's samples and probes.
        inputs: these inputs, made before, instead of generated ones.
        compiled: the backend of ``torch.compile`` through which calls go; empty for direct calls. The implementation
            must be registered with the process's manager.
        race_calls: largest number of further calls on serving inputs, under load.
        race_seconds: seconds that they may take in all.

    Raises:
        DispatchError: the operator is not declared, has no samples or no reference.
    """
    if inputs is None:
        inputs = Inputs(manager, impl.op_name, dtype, device, seed=seed, samples=samples)
    tolerance = inputs.operator.tolerances.get(dtype, Tolerance(0.0, 0.0))
    name = str(dtype).removeprefix("torch.")
    found = Verification(impl.op_name, impl.impl_id, name, tolerance, compiled or "direct", inputs.seed)
    direct = direct_function(manager.state, impl)
    trial = _Trial(
        found,
        manager.state,
        impl,
        direct,
        compiled_function(impl, compiled) if compiled else direct,
        repeats,
        bool(impl.traits.deterministic),
        bool(compiled),
    )
    with refusals_counted():
        for given in inputs:
            trial.run(given)
        if not found.problems and (problem := found.rounding.problem(found.mean_error)):
            found.problems.append(f"all inputs: {problem}")
        if trial.stable and not found.problems and not compiled:
            with load(device):
                trial.race(race_calls, race_seconds)
    return found


@dataclass
class _Trial:
    """The trial of one implementation.

    Args:
        found: the findings so far.
        state, impl: the manager's state, and the implementation.
        direct: the implementation's function.
        function: the function to call: ``direct``, or compiled code that calls it.
        repeats: calls for each input.
        deterministic: whether every call must give the same bits.
        compiled: whether ``function`` is compiled code.
        stable: serving inputs, with the results of the first call.
    """

    found: Verification
    state: State
    impl: OpImpl
    direct: Callable[..., Any]
    function: Callable[..., Any]
    repeats: int
    deterministic: bool
    compiled: bool
    stable: list[tuple[Input, Weights, list[Tensor]]] = field(default_factory=list)

    def run(self, given: Input) -> None:
        """Verify one input, with declared weights and with plain ones.

        An implementation that makes no form of declared weights reads them like plain ones, so one call with declared
        weights is enough.
        """
        refusals: list[str] = []
        ways: set[str] = set()
        found = self.found
        for stay in (True, False) if given.operator.stay(given.args) else (False,):
            weights = Weights(given, stay)
            blamed = len(found.problems)
            refusal = self._refusal(given, weights)
            if not refusal and len(found.problems) == blamed:
                refusal = self._verify(given, weights)
            found.prepares |= weights.asked
            for why in weights.refused:
                found.refused[why] = found.refused.get(why, 0) + 1
            if refusal:
                refusals.append(refusal)
            else:
                ways.add(PREPARED if weights.prepared else PLAIN)
            if len(found.problems) > blamed and not weights.prepared:
                break  # with plain weights it would be the same fault
        found.samples += bool(ways)
        found.prepared += PREPARED in ways
        found.plain += PLAIN in ways
        if not ways and refusals:
            found.declined[given.label] = refusals[0]

    def _refusal(self, given: Input, weights: Weights) -> str:
        """Return why the implementation does not take an input, or empty."""
        try:
            return why_declined(self.state, self.impl, weights.arguments())
        except Exception as error:  # foreign code: whatever it raises is the finding
            self.found.blame(given, f"its 'supports' raised {text_of(error)}")
            return ""

    def _verify(self, given: Input, weights: Weights) -> str:
        """Verify one input in one way; return why the implementation does not take it."""
        first: list[Tensor] | None = None
        alive: list[Tensor] = []
        if self.compiled:
            torch._dynamo.reset()  # each input compiles again, and Dynamo limits the number of compilations
        if self.compiled and weights.declared:
            with contextlib.suppress(Exception):  # what the call raises, it also raises below
                self.direct(*weights.arguments())  # compiled code uses forms that calls outside it made
        for repeat in range(self.repeats):
            args = weights.arguments()
            try:
                result = _called(self.function, args, poisoned=repeat == 0)
            except NotImplementedError as error:
                return str(error) or "it raised NotImplementedError"
            except Exception as error:  # foreign code: whatever it raises is the finding
                self.blame(given, weights, f"it raised {text_of(error)}")
                return ""
            problem, tensors = self._judged(given, weights, args, result, repeat)
            if not problem and first is not None and self.deterministic and not same_bits(first, tensors):
                problem = f"it gives other bits for the same input in call {repeat + 1}"
            results = [one for one in flat(result) if isinstance(one, Tensor)]
            if not problem and any(share_memory(one, other) for one in results for other in alive):
                problem = f"call {repeat + 1} returns memory that the result of a call before lies in"
            if problem:
                self.blame(given, weights, problem)
                return ""
            first = tensors if first is None else first
            alive += results
            if weights.declared and not weights.prepared:
                return ""
        if weights.prepared:
            self._write(given, weights)
        if first and given.serving:
            self.stable.append((given, weights, first))
        return ""

    def _write(self, given: Input, weights: Weights) -> None:
        """Check that the next call after the weights were written uses the new ones; restore them."""
        other = given.rewritten
        weights.write(other, self.compiled)
        args = weights.arguments()
        try:
            problem, _ = self._judged(other, weights, args, _called(self.function, args, poisoned=False), repeat=0)
        except Exception as error:  # foreign code
            problem = f"it raised {text_of(error)}"
        if problem:
            self.blame(given, weights, f"in the call after its weights were written: {problem}")
        weights.write(given, self.compiled)

    def blame(self, given: Input, weights: Weights, problem: str) -> None:
        """Record an input's problem, and whether it ran with prepared weights if there was a choice."""
        self.found.blame(given, f"with prepared weights: {problem}" if weights.prepared else problem)

    def _judged(
        self, given: Input, weights: Weights, args: Arguments, result: Any, repeat: int
    ) -> tuple[str, list[Tensor]]:
        """Return the problem of one call, or empty, and copies of its outputs."""
        operator, found = given.operator, self.found
        if repeat == 0 and (problem := broken_promise(operator, args, result)):
            return problem, []
        kept: Named = [(name, None if one is None else one.clone()) for name, one in outputs(operator, args, result)]
        tensors = [one for _, one in kept if one is not None]
        written = operator.written(args)
        if touched := changed(list(operator.parameters), weights.before, args, list(written)):
            return f"it changes {', '.join(touched)}, which it must only read", []
        if repeat and self.deterministic:
            return "", tensors
        before = operator.written(given.args).items()
        state = {f"'{name}'": tensor for name, (access, tensor) in before if access is Access.STATE}
        if problem := strays(state, kept, given.expected):
            return problem, []
        compared = compare(given.label, kept, given.expected, given.tolerance)
        if compared.worst is not None and (found.worst is None or not compared.worst.share <= found.worst.share):
            found.worst = compared.worst
        found.rounding += compared.rounding
        bound = operator.most_mean_error(given.args)
        found.mean_error = max(found.mean_error, bound)
        problem = compared.problem or compared.rounding.problem(bound)
        if compared.missing:
            marked = [] if self.compiled else _marked(given, weights, self.function)
            problem = absent(kept, marked, compared.missing, UNTOUCHED)
        return problem, tensors

    def race(self, calls: int, seconds: float) -> None:
        """Repeat calls with known results, each input in turn."""
        end = time.perf_counter() + seconds
        found = self.found
        while found.calls < calls and time.perf_counter() < end:
            given, weights, first = self.stable[found.calls % len(self.stable)]
            args = weights.arguments()
            found.calls += 1
            try:
                got = outputs(given.operator, args, self.direct(*args))
            except Exception as error:  # foreign code
                self.blame(given, weights, f"call {found.calls} under load raised {text_of(error)}")
                return
            if self.deterministic:
                wrong = not same_bits(first, [one for _, one in got if one is not None])
            else:
                compared = compare(given.label, got, given.expected, given.tolerance)
                wrong = bool(compared.problem or compared.missing)
            if wrong:
                problem = f"call {found.calls} under load gives another result for the same input"
                self.blame(given, weights, problem)
                return


def _called(function: Callable[..., Any], args: Arguments, poisoned: bool) -> Any:
    if not poisoned:
        return function(*args)
    with poisoned_memory():
        return function(*args)


def _marked(given: Input, weights: Weights, function: Callable[..., Any]) -> Named:
    """Call with new memory full of a marker, which stays in unwritten elements; return the outputs, or nothing if it
    fails.
    """
    args = weights.arguments()
    for access, tensor in given.operator.written(args).values():
        if access is Access.OUTPUT:
            tensor.fill_(UNTOUCHED)
    try:
        with MarkedMemory():  # type: ignore[no-untyped-call]
            return outputs(given.operator, args, function(*args))
    except Exception:  # the call before was the finding; this one only adds detail
        return []


def implementations(
    manager: OpManager, op_names: Sequence[str] | None = None, impl_ids: Sequence[str] | None = None
) -> list[OpImpl]:
    """Return registered implementations of verifiable operators, optionally of some operators or with some ids.

    Raises:
        DispatchError: an operator is not declared, or no backend registered an id for any of the operators.
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
            raise DispatchError(f"no backend registered an implementation '{impl_id}'{of}")
    return found

"""The trial of candidates: each is verified, the right ones race registered implementations, and the fastest wins."""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median

import torch
from torch import Tensor

from ...devices import device_of
from ...errors import DispatchError, text_of
from ...manager import OpManager, get_default_manager
from ...ops import Access, Operator, Place, Sample
from ...ops.results import broken_promise, flat
from ...registry import OpRegistry
from ...types import BackendImplKind, OpImpl
from ..arguments import copied
from ..cases import Case, cases, short_cases
from ..comparison import compare
from ..inputs import Input, Inputs, outputs
from ..intervals import interval
from ..rates import Yardstick
from ..timing import Clock
from ..verify import Verification, verify
from .candidate import Candidate
from .process import Ended, Limits, Process
from .timed import Timed

ROUNDS = 15
"""Timed questions to each function about each case, each with numbers that no process has seen before."""
QUESTION_SECONDS = 0.005
"""Seconds of a timed question, so that the way to the process and back is a small share."""
MOST_CALLS = 512
"""Largest number of calls of a question."""
MOST_BYTES = 1 << 32
"""Largest size of their arguments and results."""
LAUNCH_SECONDS = 3e-5
"""Seconds in which a host launches a kernel; a shorter kernel would wait for its host."""
CASES = 4
"""Cases that are timed."""
DRAWN = 8
"""Inputs with shapes that a file could not foresee."""
MOST_DRAWN_BYTES = 1 << 24
"""Largest size of their arguments, in bytes."""
MOST_DRAWN_OPERATIONS = 1 << 28
"""Largest number of operations of a call with them."""
SURELY = 0.99
"""Confidence of the interval of a speed."""


@dataclass
class Proof:
    """The findings about one candidate.

    Args:
        candidate: the file.
        problem: why it was refused, or ended; empty if it ran to the end.
        verified: the verdicts, one for each dtype.
        seconds: case → seconds of a call in each round.
        calls: case → calls of a timed question.
        faster: speed-up over the fastest registered implementation, over all cases, with the ends of its interval.
    """

    candidate: Candidate
    problem: str = ""
    verified: list[Verification] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    faster: tuple[float, float, float] | None = None

    @property
    def problems(self) -> list[str]:
        """Return all problems, one sentence each."""
        return [self.problem] * bool(self.problem) + [
            f"{one.dtype}: {text}" for one in self.verified for text in one.problems
        ]

    @property
    def right(self) -> bool:
        """Whether it is right wherever it ran, and ran at least once."""
        return not self.problems and any(one.samples for one in self.verified)

    @property
    def verdict(self) -> str:
        """Return ``right``, ``wrong``, or ``nothing to run``."""
        return "right" if self.right else "wrong" if self.problems else "nothing to run"


@dataclass(frozen=True)
class Trial:
    """The conditions of a trial.

    Args:
        operator: the candidates' operator.
        device: the device of the runs.
        dtypes: dtypes of verification; times are for the first.
        limits: limits of each process.
        against: ids of implementations to be faster than; by default all registered ones.
        seed: the inputs' seed, which no file could know.
    """

    operator: Operator
    device: torch.device
    dtypes: Sequence[torch.dtype]
    limits: Limits
    against: Sequence[str] = ()
    seed: int = field(default_factory=lambda: secrets.randbits(32))
    _made: dict[torch.dtype, Inputs] = field(default_factory=dict)

    def rivals(self) -> list[OpImpl]:
        """Return the registered implementations.

        Raises:
            DispatchError: a named one is not registered.
        """
        manager = get_default_manager()
        manager.ensure_initialized()
        found = {one.impl_id: one for one in manager.registry.get_implementations(self.operator.name)}
        for impl_id in self.against:
            if impl_id not in found or not found[impl_id].availability()[0]:
                raise DispatchError(f"'{impl_id}' of '{self.operator.name}' cannot run here")
        return [one for name, one in found.items() if one.availability()[0] and name in (self.against or found)]

    def verify(self, proof: Proof) -> None:
        """Verify one candidate in a separate process, in every dtype."""
        candidate = proof.candidate
        if candidate.problem:
            proof.problem = candidate.problem
            return
        try:
            process = Process(self.operator.name, candidate.text, "", self.device, self.limits)
        except Ended as ended:
            proof.problem = str(ended)
            return
        try:
            manager, impl = _registered(candidate, process)
            for dtype in self.dtypes:
                proof.verified.append(verify(manager, impl, dtype, self.device, inputs=self.inputs(dtype)))
                if proof.verified[-1].problems:
                    return  # a wrong candidate is not worth more time
        except DispatchError as error:
            proof.problem = text_of(error)
        except Ended as ended:
            proof.problem = str(ended)
        finally:
            process.stop()

    def inputs(self, dtype: torch.dtype) -> Inputs:
        """Return the inputs in one dtype, which all candidates share."""
        if dtype not in self._made:
            manager, name = get_default_manager(), self.operator.name
            manager.ensure_initialized()
            self._made[dtype] = Inputs(manager, name, dtype, self.device, samples=self._samples(dtype))
            self._made[dtype].seed = self.seed
        return self._made[dtype]

    def _samples(self, dtype: torch.dtype) -> Iterator[Sample]:
        """Yield the declared inputs, with this run's seed, then others for which no file could be written."""
        generator = torch.Generator().manual_seed(self.seed)
        operator = self.operator
        assert operator.samples is not None
        yield from operator.samples(dtype, self.device, generator)
        if operator.probes is not None:
            yield from operator.probes(dtype, self.device, generator)
        torch.manual_seed(self.seed)
        yield from self._drawn(dtype)
        served = [one for one in operator.samples(dtype, self.device, generator) if one.serving]
        for sample in served[:3]:
            yield Sample(f"{sample.label}, other numbers", sample.args, sample.serving)
        served = [one for one in operator.samples(dtype, self.device, generator) if one.serving]
        for sample in served[:2]:
            if _propagates(operator) and _spoil(operator, sample):
                yield Sample(f"{sample.label}, one NaN", sample.args, serving=False)

    def _drawn(self, dtype: torch.dtype) -> Iterator[Sample]:
        """Yield benchmark shapes of random sizes."""
        chosen = random.Random(self.seed)
        tokens = [chosen.randint(2, 40), chosen.randint(41, 700)]
        hidden = [128 * chosen.randint(1, 12), 128 * chosen.randint(13, 40)]
        place = Place(dtype, self.device)
        found = list(cases(self.operator, place, tokens, hidden)) if self.operator.shapes else []
        chosen.shuffle(found)
        for case in itertools.islice((case for case in found if _is_small(case)), DRAWN):
            label = " ".join(filter(None, (case.label, f"{case.tokens}x{case.width}, drawn")))
            yield Sample(label, case.make(), serving=False)

    def race(self, proofs: Sequence[Proof]) -> dict[str, dict[str, float]]:
        """Time the right candidates alternately with rivals; return id → case → median seconds of rivals.

        The clock is this process's, from a question for many calls to its answer, which comes when the device has
        finished. The arguments are on the device before, and results stay there until the clock has stopped.
        """
        right = [proof for proof in proofs if proof.right]
        if not right or self.operator.work is None:
            return {}
        dtype = self.dtypes[0]
        chosen = self._chosen(dtype)
        with contextlib.ExitStack() as stack:
            processes: dict[str, Process] = {}

            def start(runner: str, text: str, impl_id: str) -> None:
                processes[runner] = Process(self.operator.name, text, impl_id, self.device, self.limits)
                stack.callback(processes[runner].stop)

            for one in self.rivals():
                try:
                    start(one.impl_id, "", one.impl_id)
                except Ended as ended:
                    raise DispatchError(f"'{one.impl_id}' cannot run in a process of its own: {ended}") from None
            own = {f"{proof.candidate.name}.py": proof for proof in right}
            for file, proof in own.items():
                try:
                    start(file, proof.candidate.text, "")
                except Ended as ended:
                    proof.problem = str(ended)
            times: dict[str, dict[str, list[float]]] = {runner: {} for runner in processes}
            for case in chosen:
                self._rounds(case, dtype, processes, times, own)
        for proof in right:
            proof.seconds = times.get(f"{proof.candidate.name}.py", {})
        rivals = {runner: found for runner, found in times.items() if runner not in own and found}
        _compare([proof for proof in right if proof.right], rivals)
        return {runner: {case: median(all_) for case, all_ in found.items()} for runner, found in rivals.items()}

    def _chosen(self, dtype: torch.dtype) -> list[Case]:
        """Return the cases to time: of the larger half, those that keep the device busy longer than a launch takes."""
        rates = Yardstick(Clock(self.device), dtype).rates
        short, _ = short_cases(self.operator, Place(dtype, self.device), rates)
        large = sorted(short, key=lambda case: case.least[0].bytes_moved)[len(short) // 2 :]
        held = [case for case in large if _bytes(case) <= self.limits.megabytes << 18]
        telling = [case for case in held if case.least[0].bytes_moved >= LAUNCH_SECONDS * rates.copy_bytes_per_s]
        chosen = telling or held or large
        return chosen[:: max(1, -(-len(chosen) // CASES))]

    def _rounds(
        self,
        case: Case,
        dtype: torch.dtype,
        processes: dict[str, Process],
        times: dict[str, dict[str, list[float]]],
        own: dict[str, Proof],
    ) -> None:
        """Time one case; one result of each question to a candidate is compared, drawn after the clock has stopped."""
        label = " ".join(filter(None, (case.label, f"{case.tokens}x{case.width}")))
        timed, most = Timed.of(case, dtype), self._most_calls(case, len(processes))
        calls, found = dict.fromkeys(processes, 0), {runner: list[float]() for runner in processes}
        for turn in range(-1, ROUNDS):
            seed, compared = secrets.randbits(32), dict[int, Input]()
            for runner in random.sample(list(found), len(found)):
                process = processes[runner]
                try:
                    if turn < 0:
                        calls[runner] = _calls_of(process, timed, seed, most)
                    process.make(timed, seed, calls[runner])
                    seconds = process.time() / calls[runner]
                    why = self._why_wrong(process, timed, seed, calls[runner], compared) if runner in own else ""
                except Ended as ended:
                    why = str(ended)
                except Exception:  # it declines or fails in this case, and has no time there
                    del found[runner]
                    continue
                if why:
                    if runner in own:
                        own[runner].problem = f"{label}, timed: {why}"
                    del processes[runner], found[runner]
                elif turn >= 0:
                    found[runner].append(seconds)
        for runner, all_ in found.items():
            times[runner][label] = all_
            if runner in own:
                own[runner].calls[label] = calls[runner]

    def _most_calls(self, case: Case, processes: int) -> int:
        """Return the largest number of calls of a question for which every process has memory."""
        free = self.limits.megabytes << 20
        if (spec := device_of(self.device.type)).accelerator:
            free = spec.memory(self.device.index or 0)[0] // processes
        return max(1, min(MOST_CALLS, min(free // 8, MOST_BYTES) // _bytes(case)))

    def _why_wrong(self, process: Process, timed: Timed, seed: int, calls: int, compared: dict[int, Input]) -> str:
        """Compare one result of a question, drawn now; return what is wrong with it, or empty."""
        number, operator = secrets.randbelow(calls), self.operator
        (args,) = timed.calls(self.device, seed + number)
        given = copied(args)
        result = process.fetch(number, given)
        if number not in compared:
            dtype, samples = getattr(torch, timed.dtype), [Sample("", args)]
            (compared[number],) = Inputs(get_default_manager(), operator.name, dtype, self.device, samples=samples)
        if problem := broken_promise(operator, given, result):
            return problem
        one = compared[number]
        found = compare("", outputs(operator, given, result), one.expected, one.tolerance)
        return found.problem.removeprefix(": ") or ("a result is NaN" if found.missing else "")


def _registered(candidate: Candidate, process: Process) -> tuple[OpManager, OpImpl]:
    """Return a separate manager with the reference and the candidate; its calls go to the process."""
    registry = OpRegistry()
    default = get_default_manager()
    default.ensure_initialized()
    op_name = candidate.operator.name
    impls = default.registry.get_implementations(op_name)
    registry.register_many([one for one in impls if one.kind is BackendImplKind.REFERENCE])

    impl = candidate.implementation(process)
    registry.register_impl(impl)
    return OpManager(registry, register_builtins=False), impl


def _compare(right: Sequence[Proof], rivals: dict[str, dict[str, list[float]]]) -> None:
    """Compute each candidate's speed-up over the fastest rival of each case, round by round."""
    for proof in right:
        shares = []
        for case, own in proof.seconds.items():
            there = [all_[case] for all_ in rivals.values() if case in all_]
            if there:
                best = min(there, key=median)
                shares.append([theirs / ours for theirs, ours in zip(best, own, strict=False)])
        if shares:
            rounds = [geometric_mean(one) for one in zip(*shares, strict=False)]
            proof.faster = (median(rounds), *interval(rounds, SURELY))


def _calls_of(process: Process, timed: Timed, seed: int, most: int) -> int:
    """Return the number of calls that take :data:`QUESTION_SECONDS`; the first question compiles."""
    process.make(timed, seed, 1)
    process.time()
    calls = 1
    while True:
        process.make(timed, seed, calls)
        seconds = process.time()
        if calls == most or seconds > QUESTION_SECONDS / 4:
            return max(1, min(most, round(calls * QUESTION_SECONDS / seconds)))
        calls = min(most, 8 * calls)


def _bytes(case: Case) -> int:
    """Return about the bytes of a call's arguments and results."""
    work, size = case.least
    return max(work.bytes_moved, size, 1)


def _is_small(case: Case) -> bool:
    work, size = case.least
    return size <= MOST_DRAWN_BYTES and work.operations <= MOST_DRAWN_OPERATIONS


def _propagates(operator: Operator) -> bool:
    """Whether a NaN argument gives a NaN in the results: they are numbers, and all are returned."""
    return operator.fake is not None and not any(write.access is Access.STATE for write in operator.writes.values())


def _spoil(operator: Operator, sample: Sample) -> bool:
    """Make one number of the leading tensor NaN; return whether there is one, and the results can hold it."""
    assert operator.fake is not None
    args = operator.bind(sample.args, {})
    first = next((one for one in args if isinstance(one, Tensor)), None)
    results = [one for one in flat(operator.fake(*args)) if isinstance(one, Tensor)]
    if first is None or not first.numel() or any(not one.dtype.is_floating_point for one in (first, *results)):
        return False
    if any(one.itemsize < 2 for one in (first, *results)):
        return False
    first[(0,) * first.dim()] = float("nan")
    return True

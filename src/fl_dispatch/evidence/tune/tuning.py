"""One tuning: its plan, the estimated time, and its run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from ...devices import device_of
from ...errors import DispatchError
from ...manager import OpManager
from ...ops import OPERATORS, Place, Workload
from ...ops.declaration import Mode
from ...run.direct import direct_function
from ...selection.decision import select
from ...settings.selection_policy import SelectionPolicy
from ...settings.tuned import OURS, installed
from ...state import State
from ...types import OpImpl
from ..bench import expected_seconds
from ..rates import Yardstick
from ..timing import Clock
from .between import DRAWN, prove_sizes, sizes_of
from .calls import Key, TunedCase, tuned_cases
from .late_compilation import late_compilation, requests_of, start_of
from .model import Dimensions
from .providers import providers
from .race import PROVEN, REPEATS, Outcome, accepted, is_provable, prove, race
from .record import TOGETHER, Record
from .rules import Group, group_of

PROOF_SECONDS = 0.1
"""Seconds to prove a candidate at a shape, for an estimate."""
WARM_SECONDS = 2.0
"""Seconds to find out whether a candidate that can compile later does so, for an estimate."""
CANDIDATES = 3
"""Approximate number of candidates per operator."""

Begin = Callable[[str], None]
End = Callable[[float], None]


@dataclass(frozen=True)
class Plan:
    """The plan of a tuning.

    Args:
        manager: the candidates' manager.
        model, place: the model, and the place and dtype of its calls.
        policy: gives the default order, and excludes implementations.
        batches: tokens of decoding steps.
        prefills: tokens of steps that read prompts.
        contexts: keys of decoding requests.
        eager: whether no graph is captured, for compiled and eager models.
        repeats: repeats of each candidate.
        op_names: only these operators.
        one_graph: Inductor compiles a model into one graph for all sizes; a rule that tests a call would break that.
        fused: operators with references that Inductor fuses into that graph. They are not tuned.
    """

    manager: OpManager
    model: Dimensions
    place: Place
    policy: SelectionPolicy
    batches: tuple[int, ...]
    prefills: tuple[int, ...]
    contexts: tuple[int, ...]
    eager: bool
    repeats: int = REPEATS
    op_names: tuple[str, ...] = ()
    one_graph: bool = False
    fused: tuple[str, ...] = ()

    @property
    def accelerator(self) -> bool:
        """Whether the place is an accelerator."""
        return device_of(self.place.device.type).accelerator

    def cases(self) -> list[TunedCase]:
        """Return the shapes, those of a call ordered by size.

        Raises:
            DispatchError: there are none, or an operator is not declared.
        """
        for name in self.op_names:
            if name not in OPERATORS:
                raise DispatchError(f"operator '{name}' is not declared; see fl ops")
            if name in self.fused:
                raise DispatchError(f"a compiled model fuses the reference of '{name}' here; --eager tunes it")
        found = [tuned for tuned in self._called() if tuned.key.op_name not in self.fused]
        if not found:
            raise DispatchError(f"the model's layers do not call {', '.join(self.op_names)}")
        return found

    def _called(self) -> list[TunedCase]:
        return tuned_cases(
            self.model, self.place, self.batches, self.prefills, self.contexts, self.accelerator, self.op_names
        )

    def left_out(self) -> list[str]:
        """Return the operators that the model calls and that a compiled model's graph fuses."""
        return [name for name in dict.fromkeys(tuned.key.op_name for tuned in self._called()) if name in self.fused]

    def together(self) -> list[str]:
        """Return the operators that a compiled model's one graph contains, if no rule tests the call."""
        called = dict.fromkeys(tuned.key.op_name for tuned in self.cases())
        return [name for name in called if self.one_graph and Mode.INLINE in OPERATORS[name].modes]

    def candidates(self, key: Key) -> tuple[OpImpl, ...]:
        """Return the implementations that may run, in the default order."""
        impls = self.manager.registry.get_implementations(key.op_name)
        decision = select(key.op_name, impls, self.policy)
        return decision.branch_for(Workload(self.place.dtype, key.tokens, key.phase)).candidates

    def is_eager(self, tuned: TunedCase) -> bool:
        """Whether no graph holds this call: prompts' calls are larger than captured sizes."""
        return self.eager or tuned.step > max(self.batches)

    def facts(self, machine: Mapping[str, Any], driver: str) -> dict[str, Any]:
        """Return the facts under which the findings are valid."""
        ops = dict.fromkeys(tuned.key.op_name for tuned in self.cases())
        order = {
            name: [impl.impl_id for impl in select(name, self._impls(name), self.policy).candidates] for name in ops
        }
        return {
            "machine": dict(machine),
            "driver": driver,
            "model": asdict(self.model),
            "dtype": str(self.place.dtype).removeprefix("torch."),
            "batches": list(self.batches),
            "prefills": list(self.prefills),
            "contexts": list(self.contexts),
            "eager": self.eager,
            "repeats": self.repeats,
            "order": order,
            "proof": PROVEN,
            TOGETHER: self.together(),
        }

    def _impls(self, op_name: str) -> Sequence[OpImpl]:
        return self.manager.registry.get_implementations(op_name)

    def providers(self, winners: Mapping[Key, str], rules: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return operator → package → version: the packages of its winners, or ours for rules of the shipped file."""
        found = {name.partition("@")[0]: {OURS: installed(OURS)} for name in rules}
        for name in dict.fromkeys(key.op_name for key in winners):
            chosen = {winner for key, winner in winners.items() if key.op_name == name}
            found[name] = providers(impl for impl in self._impls(name) if impl.impl_id in chosen)
        return found


def steps(plan: Plan, record: Record, yardstick: Yardstick) -> Iterator[tuple[str, float, Callable[[], None]]]:
    """Yield the remaining steps: a name, the estimated seconds, and a function that runs and records it.

    Findings in the record are not repeated.
    """
    cases = plan.cases()
    proofs: dict[tuple[str, str, str | None, str], Outcome] = {}
    for op_name in dict.fromkeys(tuned.key.op_name for tuned in cases):
        mine = [tuned for tuned in cases if tuned.key.op_name == op_name]
        if op_name not in record.late:
            seconds = WARM_SECONDS * CANDIDATES if plan.accelerator else 0.5
            yield f"starting {op_name}", seconds, lambda op=op_name, own=mine: _look(plan, record, op, own)  # type: ignore[misc]
        for tuned in mine:
            if tuned.name not in record.cases:
                once = expected_seconds(tuned.case, yardstick) + PROOF_SECONDS
                yield tuned.name, CANDIDATES * once, lambda t=tuned: _measure(plan, record, t, yardstick.clock, proofs)  # type: ignore[misc]
        if any(tuned.name not in record.cases for tuned in mine) or _unproven(record, op_name):
            seconds = PROOF_SECONDS * (DRAWN + 2) * len(mine)
            yield (
                f"{op_name}: sizes between",
                seconds,
                partial(_prove_sizes, plan, record, op_name, mine, yardstick.clock),
            )


def _unproven(record: Record, op_name: str) -> list[tuple[Key, str]]:
    """Return keys of an operator with winners that were not tried at the other sizes of their rules."""
    chosen = {key: choice.impl_id for key, choice in record.choices().items() if key.op_name == op_name}
    return [
        (key, winner) for key, winner in chosen.items() if winner and winner not in record.between.get(str(key), {})
    ]


def _prove_sizes(plan: Plan, record: Record, op_name: str, cases: list[TunedCase], clock: Clock) -> None:
    """Prove the winners of an operator at the other sizes of their rules; a wrong one loses, and the next is proven."""
    largest: dict[Group, int] = {}
    for tuned in cases:
        largest[group_of(tuned.key)] = max(tuned.key.tokens, largest.get(group_of(tuned.key), 0))
    while todo := _unproven(record, op_name):
        for key, winner in todo:
            (impl,) = (one for one in plan.candidates(key) if one.impl_id == winner)
            for above, kind in ((False, record.between), (True, record.above)):
                if not above or key.tokens == largest[group_of(key)]:
                    sizes = sizes_of(cases, key, above, record.seed)
                    found = prove_sizes(plan.manager, impl, sizes, clock, plan.place.dtype)
                    kind.setdefault(str(key), {})[winner] = found.as_data()
    clock.spec.empty_cache()


def _call(state: State, impl: OpImpl, *args: Any) -> None:
    direct_function(state, impl)(*accepted(state, impl, OPERATORS[impl.op_name].bind(args, {})))


def _look(plan: Plan, record: Record, op_name: str, cases: list[TunedCase]) -> None:
    """Find which candidates of an operator compile after a start, and record it."""
    impls = {impl.impl_id: impl for tuned in cases for impl in plan.candidates(tuned.key)}
    sizes, most = [*plan.batches, *plan.prefills], max(plan.batches)
    found = {}
    for impl_id, impl in impls.items():
        start = start_of(plan.model, op_name, plan.place, sizes, most)
        requests = requests_of(plan.model, op_name, plan.place, sizes, cases)
        why = late_compilation(partial(_call, plan.manager.state, impl), start, requests)
        if why:
            found[impl_id] = why
    record.late[op_name] = found


def _measure(
    plan: Plan,
    record: Record,
    tuned: TunedCase,
    clock: Clock,
    proofs: dict[tuple[str, str, str | None, str], Outcome],
) -> None:
    """Prove and time the candidates of one shape, and record them."""
    candidates = plan.candidates(tuned.key)
    kind = (tuned.key.op_name, tuned.case.label, tuned.key.phase)
    if is_provable(tuned.case, plan.accelerator):
        for impl, outcome in zip(
            candidates, prove(plan.manager, candidates, tuned.case, plan.place.dtype, clock), strict=True
        ):
            proofs[(*kind, impl.impl_id)] = outcome
    unproven = Outcome(problem="not proven: the shape is too large for the reference, and no smaller one was measured")
    outcomes = [replace(proofs.get((*kind, impl.impl_id), unproven), seconds=[]) for impl in candidates]
    race(plan.manager, candidates, outcomes, tuned.case, clock, eager=plan.is_eager(tuned), repeats=plan.repeats)
    record.keep(tuned, {impl.impl_id: outcome for impl, outcome in zip(candidates, outcomes, strict=True)})
    clock.spec.empty_cache()


def seed() -> None:
    """Seed the inputs of a tuning, so that every run has the same ones."""
    torch.manual_seed(0)

"""Tuning as a whole, on the CPU, for the calls of a tiny model; candidates with a planted fault never win."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor

from builders import impl
from command import fl
from fl_dispatch import DispatchError, SelectionPolicy, get_default_manager, get_policy, policy_context
from fl_dispatch.cli import tune as command
from fl_dispatch.cli import tune_engine
from fl_dispatch.cli.output import ResultFile
from fl_dispatch.devices import device_of
from fl_dispatch.evidence.rates import Rates
from fl_dispatch.evidence.timing import Clock
from fl_dispatch.evidence.tune.between import sizes_of
from fl_dispatch.evidence.tune.engine import Cell, cells, compared, disagreements, measure, workloads
from fl_dispatch.evidence.tune.late_compilation import compilations
from fl_dispatch.evidence.tune.model import Dimensions, dimensions, read_model
from fl_dispatch.evidence.tune.record import Record, resumed
from fl_dispatch.evidence.tune.rules import merge
from fl_dispatch.evidence.tune.tuning import Plan, steps
from fl_dispatch.hosting.layers.survey import Survey
from fl_dispatch.hosting.records import runs
from fl_dispatch.hosting.records.runs import Sizes
from fl_dispatch.ops import Place
from fl_dispatch.settings import TunedRule, load_config_file, platforms
from fl_dispatch.settings.tuned import OURS, installed
from fl_dispatch.types import OpImpl

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "torch_dtype": "float32",
}
PLACE = Place(torch.float32, torch.device("cpu"))
SETTLE = 3e-4
"""Seconds that a slow candidate takes longer, which no load of a machine turns around in the medians of some turns."""


class Yardstick:
    """A device of known rates."""

    def __init__(self) -> None:
        self.clock, self.rates = Clock(PLACE.device), Rates(1e9, 1e9)


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def slow(x: Tensor) -> Tensor:
    time.sleep(SETTLE)
    return gated(x)


def plan_of(*candidates: OpImpl, **fields: Any) -> Plan:
    manager = get_default_manager()
    manager.ensure_initialized()
    manager.registry.register_many(list(candidates))
    policy = SelectionPolicy(deny_vendors=frozenset({"cpu"}))
    values: dict[str, Any] = {
        "manager": manager, "model": dimensions(CONFIG), "place": PLACE, "policy": policy, "batches": (1, 2),
        "prefills": (8,), "contexts": (16,), "eager": True, "repeats": 7, "op_names": ("silu_and_mul",),
    }  # fmt: skip
    return Plan(**{**values, **fields})


def tuned(plan: Plan, record: Record | None = None) -> Record:
    record = record if record is not None else Record({})
    for _, seconds, do in steps(plan, record, Yardstick()):  # type: ignore[arg-type]
        assert seconds > 0
        do()
    return record


def winners(record: Record) -> set[str]:
    return {choice.impl_id for choice in record.choices().values()}


def problems(record: Record, impl_id: str) -> str:
    return " ".join(one.problem for figures in record.figures().values() for one in figures if one.impl_id == impl_id)


def candidate(impl_id: str, fn: Callable[..., Any], priority: int, **fields: Any) -> OpImpl:
    return impl(impl_id, fn, "silu_and_mul", priority=priority, **fields)


def test_the_fastest_that_is_right_wins() -> None:
    record = tuned(plan_of(candidate("default.slow", slow, 900), candidate("default.fast", gated, 800)))
    assert winners(record) == {"default.fast"}


def test_a_wrong_candidate_never_wins_however_fast_it_is() -> None:
    def wrong(x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], x.shape[-1] // 2)

    record = tuned(plan_of(candidate("default.slow", slow, 900), candidate("default.wrong", wrong, 800)))
    assert "default.wrong" not in winners(record)
    assert "wrong: " in problems(record, "default.wrong")


def test_a_candidate_that_is_wrong_at_one_tuned_size_alone_is_no_winner_there() -> None:
    def wrong_at_eight(x: Tensor) -> Tensor:
        return gated(x) + 1 if x.shape[0] == 8 else gated(x)

    record = tuned(plan_of(candidate("default.slow", slow, 900), candidate("default.eight", wrong_at_eight, 800)))
    found = {
        key.tokens: one.problem
        for key, figures in record.figures().items()
        for one in figures
        if one.impl_id == "default.eight"
    }
    assert found[1] == found[2] == ""
    assert "wrong" in found[8]
    assert {key.tokens: choice.impl_id for key, choice in record.choices().items()}[8] != "default.eight"


def wrong_at(sizes: range) -> Callable[[Tensor], Tensor]:
    return lambda x: gated(x) + 1 if x.shape[0] in sizes else gated(x)


def rules(record: Record) -> list[TunedRule]:
    chosen = {key: choice.impl_id for key, choice in record.choices().items()}
    return list(merge(chosen, {}, record.bounded())["silu_and_mul"])


def test_a_candidate_that_is_wrong_only_between_measured_sizes_does_not_win_there() -> None:
    record = tuned(plan_of(candidate("default.between", wrong_at(range(4, 7)), 900)))
    assert {key.tokens: choice.impl_id for key, choice in record.choices().items()} == {
        1: "default.between", 2: "default.between", 8: "reference.torch",
    }  # fmt: skip
    assert "wrong: " in problems(record, "default.between")
    assert rules(record) == [
        TunedRule(order=("impl:default.between",), tokens=(0, 2)), TunedRule(order=("impl:reference.torch",)),
    ]  # fmt: skip
    (eight,) = (key for key in record.choices() if key.tokens == 8)
    found = record.between[str(eight)]["reference.torch"]
    assert {3, 7} < set(found["proven"]) <= {3, 4, 5, 6, 7}
    assert len(found["proven"]) == 4
    assert "sizes between: right at 3, " in record.served(eight, "reference.torch")
    assert "sizes above: right at 9, " in record.served(eight, "reference.torch")


def test_a_candidate_that_is_wrong_above_the_largest_size_serves_up_to_it() -> None:
    above = candidate("default.above", wrong_at(range(9, 99)), 900)
    plan = plan_of(above)
    (key, *_) = (case.key for case in plan.cases())
    assert plan.candidates(key)[0] is above, "first in the default order, too"
    record = tuned(plan)
    assert winners(record) == {"default.above"}
    assert rules(record) == [
        TunedRule(order=("impl:default.above",), tokens=(0, 8)), TunedRule(order=("reference",), tokens=(9, None)),
    ]  # fmt: skip
    served = replace(plan, policy=replace(plan.policy, op_tuned=(("silu_and_mul", tuple(rules(record))),)))
    chosen = {tokens: served.candidates(replace(key, tokens=tokens))[0].impl_id for tokens in (8, 9, 99)}
    assert chosen == {8: "default.above", 9: "reference.torch", 99: "reference.torch"}


def test_sizes_that_the_reference_cannot_compute_have_no_rule() -> None:
    record = tuned(plan_of(candidate("default.above", wrong_at(range(4, 7)), 900)))
    (eight,) = (key for key in record.choices() if key.tokens == 8)
    record.above[str(eight)]["reference.torch"] = {"proven": [], "declined": [], "too_large": [9], "problem": ""}
    assert rules(record)[-1] == TunedRule(order=("impl:reference.torch",), tokens=(3, 8))


def test_a_choice_for_all_sizes_must_be_right_above_the_largest_one() -> None:
    above = candidate("default.above", wrong_at(range(9, 99)), 900)
    plan = plan_of(above, one_graph=True)
    assert winners(tuned(plan, Record({"together": plan.together()}))) == {"reference.torch"}


def test_two_tunings_try_other_sizes_and_a_resumed_one_the_same() -> None:
    plan = plan_of(batches=(1,), prefills=(4096,))
    first, *_, last = plan.cases()
    tried = {seed: [case.tokens for case in sizes_of([first, last], last.key, False, seed)] for seed in (1, 2)}
    assert tried[1] != tried[2]
    assert [tried[1][0], tried[1][-1], len(tried[1])] == [2, 4095, 4]
    assert tried[1] == [case.tokens for case in sizes_of([first, last], last.key, False, 1)]
    assert resumed([], {}).seed != resumed([], {}).seed


def test_heads_count_as_tokens_between_sizes_too() -> None:
    cases = plan_of(op_names=("rms_norm",)).cases()
    largest = max((one.key for one in cases), key=lambda key: key.tokens)
    below = max(one.key.tokens for one in cases if one.key.tokens < largest.tokens)
    tried = [(case.label, case.tokens) for case in sizes_of(cases, largest, False, 0)]
    assert {label for label, _ in tried} >= {"query heads"}
    assert all(below < tokens <= largest.tokens for _, tokens in tried)
    assert all(tokens % 4 == 0 for label, tokens in tried if label == "query heads")


def test_a_candidate_that_compiles_after_the_start_never_wins() -> None:
    knobs = pytest.importorskip("triton").knobs
    known: set[int] = set()

    def compiles(x: Tensor) -> Tensor:
        if x.shape[0] not in known:  # a kernel for each number of tokens
            known.add(x.shape[0])
            if knobs.runtime.jit_post_compile_hook is not None:
                knobs.runtime.jit_post_compile_hook(key="", repr="", fn=None, compile=None, is_manual_warmup=False)
        return gated(x)

    record = tuned(plan_of(candidate("default.slow", slow, 900), candidate("default.compiles", compiles, 800)))
    assert "default.compiles" not in winners(record)
    assert "compiles" in problems(record, "default.compiles")


def test_what_compiles_at_the_start_alone_may_win() -> None:
    knobs = pytest.importorskip("triton").knobs
    begun: list[bool] = []

    def compiles_once(x: Tensor) -> Tensor:
        if not begun:
            begun.append(True)
            if knobs.runtime.jit_post_compile_hook is not None:
                knobs.runtime.jit_post_compile_hook(key="", repr="", fn=None, compile=None, is_manual_warmup=False)
        return gated(x)

    record = tuned(plan_of(candidate("default.slow", slow, 900), candidate("default.once", compiles_once, 800)))
    assert winners(record) == {"default.once"}


def test_a_profilers_hook_still_hears_of_compilations_and_is_put_back() -> None:
    knobs = pytest.importorskip("triton").knobs
    heard: list[str] = []
    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, lambda **_: heard.append("it")
    try:
        mine = knobs.runtime.jit_post_compile_hook
        with compilations() as found:
            knobs.runtime.jit_post_compile_hook(repr="kernel")
        assert (found, heard) == (["kernel"], ["it"])
        assert knobs.runtime.jit_post_compile_hook is mine
    finally:
        knobs.runtime.jit_post_compile_hook = before


def test_a_candidate_that_raises_or_declines_is_named_with_its_reason() -> None:
    def broken(x: Tensor) -> Tensor:
        raise ZeroDivisionError("not today")

    record = tuned(
        plan_of(
            candidate("default.broken", broken, 900),
            candidate("default.declines", gated, 800, supports=lambda x: "too small"),
            candidate("default.fast", gated, 700),
        )
    )
    assert winners(record) == {"default.fast"}
    assert "not today" in problems(record, "default.broken")
    assert "too small" in problems(record, "default.declines")


def test_a_candidate_is_never_called_with_what_it_declines() -> None:
    met: list[int] = []

    def small_ones_only(x: Tensor) -> Tensor:
        met.append(len(x))  # a compiled kernel might write anywhere
        return gated(x)

    takes = {"supports": lambda x: len(x) < 3 or "too large"}
    record = tuned(
        plan_of(candidate("default.small", small_ones_only, 900, **takes), candidate("default.fast", gated, 800))
    )
    assert max(met) < 3
    assert "too large" in problems(record, "default.small")


def test_one_graph_for_all_sizes_has_one_choice_of_what_it_takes_in_and_what_it_fuses_is_not_tuned() -> None:
    plan = plan_of(op_names=(), one_graph=True, fused=("rms_norm", "layer_norm"))
    assert plan.left_out() == ["rms_norm"]
    called = {case.key.op_name for case in plan.cases()}
    assert called == {"linear", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"}
    assert plan.together() == plan.facts({}, "")["together"] == ["linear", "silu_and_mul", "rotary_embedding"]
    assert plan_of(op_names=()).together() == plan_of(op_names=()).left_out() == []
    with pytest.raises(DispatchError, match="--eager tunes it"):
        plan_of(op_names=("rms_norm",), fused=("rms_norm",)).cases()


def test_an_interrupted_tuning_goes_on_where_it_was_and_repeats_nothing(tmp_path: Path) -> None:
    plan = plan_of(candidate("default.fast", gated, 900))
    facts = plan.facts({"device": "a chip", "versions": {"torch": "1"}}, "5")
    record = Record(facts)
    todo = list(steps(plan, record, Yardstick()))  # type: ignore[arg-type]
    for _, _, do in todo[:2]:
        do()
    kept = tmp_path / "chip.evidence.json.partial"
    kept.write_text(json.dumps(record.as_data(complete=False)))
    stale = tmp_path / "stale.partial"
    stale.write_text(json.dumps({**record.as_data(complete=False), "driver": "4"}))
    again = resumed([stale, kept], {**facts, "date": "later", "command": ["other"], "threads": 3})
    assert again.file == kept
    assert [name for name, *_ in steps(plan, again, Yardstick())] == [name for name, *_ in todo[2:]]  # type: ignore[arg-type]
    other = {**facts, "machine": {"device": "a chip", "versions": {"torch": "2"}}}
    assert not resumed([kept], other).cases


def test_ctrl_c_keeps_what_there_is_and_no_platform_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(plan: Plan, record: Record, yardstick: Any) -> Any:
        for number, step in enumerate(steps(plan, record, yardstick)):
            yield step if number < 2 else (*step[:2], lambda: signal.raise_signal(signal.SIGINT))

    monkeypatch.setattr(command, "steps", interrupted)
    monkeypatch.setattr(command, "Yardstick", lambda clock, dtype: Yardstick())
    file = tmp_path / "chip.yaml"
    evidence = ResultFile(tmp_path / "chip.evidence.json")
    with pytest.raises(typer.Exit) as ended:
        command._run(plan_of(candidate("default.fast", gated, 900)), file, evidence, fresh=False, quiet=False)
    assert ended.value.exit_code == 130
    assert not file.exists()
    kept = json.loads((tmp_path / "chip.evidence.json.partial").read_text())
    assert (len(kept["cases"]), kept["complete"]) == (1, False)
    assert "interrupted after 1 shapes" in capsys.readouterr().out


RATES = {
    "decode": {"vanilla": [9.0, 9.5, 9.2], "prefer=vendor": [8.0, 8.1, 8.2], "tuned": [10.0, 10.1, 10.2]},
    "prefill": {"vanilla": [9.0, 9.5, 9.2], "prefer=vendor": [11.0, 11.1, 11.3], "tuned": [10.0, 10.1, 10.2]},
}


def test_an_engine_that_is_faster_with_a_fixed_policy_disagrees_and_vanilla_is_no_policy() -> None:
    rows = compared(RATES)
    (told,) = disagreements(rows)
    assert told == "prefill: prefer=vendor is 1.100 times as fast as the tuned file"
    (row,) = (row for row in rows if (row["workload"], row["cell"]) == ("decode", "vanilla"))
    assert row["tuned"] == pytest.approx(10.2 / 9.2)
    assert row["low"] <= row["tuned"] <= row["high"]


def test_the_engines_rates_are_added_to_the_evidence_and_a_disagreement_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def measured(cells: Any, module: str, arguments: Any, works: Any, rounds: int, logs: Path, say: Any) -> Any:
        asked.update(cells=cells, arguments=arguments, rounds=rounds)
        return RATES

    monkeypatch.setattr(tune_engine, "measure", measured)
    monkeypatch.setattr(tune_engine.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "chip.yaml").write_text("prefer: flagos\n")
    (tmp_path / "chip.evidence.json").write_text("{}")
    assert not tune_engine.confirm(plan_of(), tmp_path, tmp_path / "chip.yaml", 4, 3)
    assert "disagrees with the kernels: prefill: prefer=vendor" in capsys.readouterr().out
    kept = json.loads((tmp_path / "chip.evidence.json").read_text())["engines"]
    assert (kept["rounds"], kept["layers"], len(kept["rows"])) == (3, 4, 6)
    (home,) = (Path(home) for home in asked["cells"]["tuned"].variables.values())
    copied = home / platforms.tuned_path(device_of("cpu")).relative_to(platforms.user_dir().parents[1])
    assert (copied.read_text(), platforms.evidence_path(copied).read_text()) == ("prefer: flagos\n", "{}")
    (empty,) = asked["cells"]["shipped file"].variables.values()
    assert not Path(empty).exists()
    assert asked["cells"]["prefer=vendor"].variables == {"VLLM_FL_PREFER": "vendor", "XDG_CONFIG_HOME": empty}
    assert asked["cells"]["vanilla"].variables == {"VLLM_PLUGINS": ""}
    assert asked["arguments"]["hf_overrides"] == {"num_hidden_layers": 4}
    assert asked["arguments"]["dtype"] == "float32"
    assert asked["arguments"]["enforce_eager"]
    tune_engine.confirm(plan_of(one_graph=True), tmp_path, tmp_path / "chip.yaml", 4, 3)
    assert not asked["arguments"]["enforce_eager"]


HOST = """
import os, time
from types import SimpleNamespace
SamplingParams = dict
class LLM:
    def __init__(self, model, **settings):
        self.preferred = os.environ.get("VLLM_FL_PREFER")
        if self.preferred == "vendor": raise RuntimeError("no engine today")
    def generate(self, prompts, sampling, use_tqdm):
        time.sleep(0.2 if self.preferred == "reference" and sampling[0]["max_tokens"] > 1 else 0.02)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0])]) for _ in prompts]
"""


def test_engines_take_turns_but_for_one_far_behind_and_one_that_does_not_start_is_left_out_by_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "vllm.py").write_text(HOST)
    own = {"PYTHONPATH": str(tmp_path)}
    preferred = {f"prefer={name}": Cell({**own, "VLLM_FL_PREFER": name}) for name in ("vendor", "reference")}
    engines = {"vanilla": Cell(own), **preferred, "tuned": Cell(own)}
    said: list[str] = []
    rates = measure(
        engines, "fl_dispatch.cli.engines.timed", {"model": "m"}, workloads(2, False), 3, tmp_path, said.append
    )
    decode = {"vanilla": 3, "prefer=reference": 1, "tuned": 3}
    turns = {work: {name: len(values) for name, values in of_cell.items()} for work, of_cell in rates.items()}
    prefill = "prefill, 4 x 256"
    assert turns == {"decode, batch 1": decode, "decode, batch 2": decode, prefill: dict.fromkeys(decode, 3)}
    (left_out,) = (line for line in said if line.startswith("left out"))
    assert "the engine 'prefer=vendor' ended with 1: RuntimeError: no engine today" in left_out
    rows = {(row["workload"], row["cell"]): row for row in compared(rates)}
    assert rows["decode, batch 1", "prefer=reference"]["tuned"] > 3
    assert not disagreements(list(rows.values()))


def test_on_a_chip_with_a_shipped_file_it_runs_beside_the_tuned_one_and_each_attention_of_the_host() -> None:
    tuned, untuned = {"XDG_CONFIG_HOME": "/mine"}, {"XDG_CONFIG_HOME": "/nothing"}
    found = cells(tuned, untuned, shipped=True, accelerator=True)
    assert [name for name, cell in found.items() if cell.is_vanilla] == ["vanilla, FLASH_ATTN", "vanilla, TRITON_ATTN"]
    assert (found["shipped file"].variables, found["tuned"].variables) == (untuned, tuned)
    assert "shipped file" not in cells(tuned, untuned, shipped=False, accelerator=True)
    faster = {"decode": {"shipped file": [11.0, 11.1, 11.2], "tuned": [10.0, 10.1, 10.2]}}
    assert disagreements(compared(faster)) == ["decode: shipped file is 1.099 times as fast as the tuned file"]


def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, sizes: Sizes | None) -> None:
    """Leave the record of a worker that serves a model, in this process's name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(runs, "_recorder", runs.Recorder())
    runs.record("vLLM 0.32", model, Survey("vLLM", {}, {}, {}), {}, sizes=sizes)


def test_a_run_gives_the_model_and_the_sizes_that_are_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    serving(tmp_path, monkeypatch, str(folder), Sizes("bfloat16", 2, 6, 4096, eager=True))
    plans: list[Plan] = []
    monkeypatch.setattr(command, "_run", lambda plan, *_: plans.append(plan))
    command.tune(run=str(os.getpid()), out=tmp_path / "chip.yaml")
    command.tune(run=str(os.getpid()), out=tmp_path / "chip.yaml", dtype="float32", max_batch=2, prefill=[64])
    as_served, given = plans
    assert (as_served.place.dtype, as_served.batches, as_served.prefills) == (
        torch.bfloat16,
        (1, 2, 4, 6),
        (2048, 4096),
    )
    assert as_served.model == read_model(folder, 2)
    assert (given.place.dtype, given.batches, given.prefills) == (torch.float32, (1, 2), (64,))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_run_says_whether_its_model_is_one_graph(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    serving(tmp_path, monkeypatch, str(tmp_path), Sizes("float32", 1, 6, 4096, eager=True, compiled=compiled))
    monkeypatch.setattr(command.inductor, "missing_for_cpp", lambda: None)
    plans: list[Plan] = []
    monkeypatch.setattr(command, "_run", lambda plan, *_: plans.append(plan))
    command.tune(run=str(os.getpid()), out=tmp_path / "chip.yaml")
    command.tune(run=str(os.getpid()), out=tmp_path / "chip.yaml", eager=True)
    assert [(plan.one_graph, plan.eager) for plan in plans] == [(compiled, True), (False, True)]


def test_eager_of_the_users_holds_for_a_run_whose_engine_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    serving(tmp_path, monkeypatch, str(tmp_path), Sizes("float32", 1, 6, 4096, eager=False, compiled=True))
    asked: list[tuple[bool, bool]] = []

    def planned(*arguments: Any) -> None:
        asked.append(arguments[5:7])

    monkeypatch.setattr(command, "_plan", planned)
    monkeypatch.setattr(command, "_run", lambda *_: None)
    command.tune(run=str(os.getpid()), out=tmp_path / "chip.yaml")
    command.tune(run=str(os.getpid()), out=tmp_path / "chip.yaml", eager=True)
    assert asked == [(True, True), (False, False)]  # compiled, captured


def test_an_earlier_tuning_does_not_say_what_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SelectionPolicy] = []
    monkeypatch.setattr(command.inductor, "missing_for_cpp", lambda: None)
    monkeypatch.setattr(command.inductor, "fused", lambda operators: asked.append(get_policy()) or ["rms_norm"])
    rule = TunedRule(order=("impl:reference.torch",))
    with policy_context(SelectionPolicy(op_tuned=(("rms_norm", (rule,)),))):
        plan = command._plan(dimensions(CONFIG), PLACE, 2, [8], [16], True, True, 3, None)
    assert [policy.op_tuned for policy in asked] == [()]
    assert plan.fused == ("rms_norm",)


def test_a_run_without_sizes_or_with_a_model_that_is_no_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(tmp_path, monkeypatch, str(tmp_path), None)
    with pytest.raises(DispatchError, match="its record has no sizes"):
        command.tune(run=str(os.getpid()))
    serving(tmp_path, monkeypatch, "someone/model", Sizes("bfloat16", 1, 6, 4096, eager=True))
    with pytest.raises(DispatchError, match="'someone/model' is no folder here"):
        command.tune(run=str(os.getpid()))
    with pytest.raises(DispatchError, match="give one of them"):
        command.tune(run=str(os.getpid()), model=tmp_path)


def test_every_declared_call_of_the_model_has_a_case_that_its_reference_runs() -> None:
    plan = plan_of(op_names=())
    names = {case.key.op_name for case in plan.cases()}
    assert names == {"linear", "rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"}
    phases = {(case.key.phase, case.key.tokens) for case in plan.cases() if case.key.op_name == "paged_attention"}
    assert phases == {("decode", 1), ("decode", 2), ("prefill", 8)}


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "model_type": "qwen3_moe"}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "model_type": "deepseek_v2"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (EXPERTS, {"fused_moe", "topk_softmax", "moe_sum"}),
        ({**EXPERTS, "scoring_func": "sigmoid"}, {"topk_sigmoid"}),
        (LATENT, {"mla_decode", "mla_prefill"}),
        ({"model_type": "gemma3"}, {"gemma_rms_norm"}),
        ({"hidden_act": "gelu_pytorch_tanh"}, {"gelu_and_mul"}),
        ({"layer_norm_eps": 1e-5}, {"layer_norm"}),
    ],
)
def test_a_model_of_another_kind_calls_other_operators(config: dict[str, Any], named: set[str]) -> None:
    plan = plan_of(model=dimensions({**CONFIG, **config}), op_names=())
    assert named <= {case.key.op_name for case in plan.cases()}


def test_ranks_share_heads_and_widths_and_an_odd_share_is_an_error() -> None:
    half: Dimensions = dimensions(CONFIG, 2)
    assert (half.heads, half.kv_heads, half.inner, half.hidden) == (2, 1, 48, 64)
    with pytest.raises(DispatchError, match="num_attention_heads, 4, cannot be divided among 3 ranks"):
        dimensions(CONFIG, 3)
    with pytest.raises(DispatchError, match="no 'hidden_size'"):
        dimensions({})


def test_the_command_writes_a_file_that_the_next_start_reads_and_that_says_when_it_is_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "home")}
    options = ["--op", "silu_and_mul", "--max-batch", "2", "--prefill", "8", "--repeats", "3"]
    done = fl("tune", "--model", str(tmp_path), *options, **environment)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "home" / "fl_dispatch" / "platforms").glob("*.yaml")
    assert "written:" in done.stdout
    evidence = file.with_name(f"{file.stem}.evidence.json")
    found = json.loads(evidence.read_text())
    assert found["complete"]
    assert {(row["op_name"], row["tokens"]) for row in found["keys"]} == {("silu_and_mul", n) for n in (1, 2, 8)}
    assert found["providers"]["silu_and_mul"]
    copied = {name for name, _ in load_config_file(file).policy.op_tuned} - {"silu_and_mul"}
    assert all(found["providers"][name] == {OURS: installed(OURS)} for name in copied)
    command._compare(file, file, json=False)
    assert "agree on 3 of 3 keys: 1.000" in capsys.readouterr().out
    assert "op_tunedofsilu_and_mul" in "".join(fl("explain", "silu_and_mul", **environment).stdout.split())
    evidence.write_text(json.dumps({**found, "providers": {"silu_and_mul": {"torch": "1.0"}}}))
    explained = fl("explain", "silu_and_mul", **environment)
    told = "".join(explained.stdout.split())
    assert "".join(f"{file} (platform, your own), line".split()) in told
    assert "op_tunedofsilu_and_mul" not in told
    assert "was tuned with something else, and does not count for silu_and_mul (torch 1.0, now" in explained.stderr

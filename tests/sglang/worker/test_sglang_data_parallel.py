"""Data-parallel attention: ranks that attend for requests of their own give Hugging Face's tokens, by our operators.

SGLang connects no scheduler of such an engine to ``collective_rpc``. Its workers' records say what they run, and strict
mode ends an engine one of whose ranks claims an operator and does not dispatch it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving import STEP, start

from processes import free_port
from running import PROMPTS
from sampling import drawn

SIZES = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
PLUGINS = {"SGLANG_FL_PLUGIN_MODULES": "wrong_plugin", "SGLANG_FL_PREFER": "reference", "SGLANG_FL_STRICT": "1"}
FAMILIES = {
    "qwen3": ("SiluAndMul", 3, "paged_attention"),
    "qwen3_moe": ("UnquantizedFusedMoEMethod", 3, "paged_attention"),
    "deepseek_v3": ("UnquantizedFusedMoEMethod", 2, "mla_decode"),
}
"""Families, each with a class of layers that both ranks share, how many there are, and the operator of attention."""
DRAWN = drawn(list(FAMILIES), 1, "data-parallel attention")
WRONG = DRAWN[0]

Runs = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def result(checkpoint: Callable[[str], Path]) -> Runs:
    """For each family two passes over the same prompts; and for one of them a pass with a wrong attention."""
    runs: dict[tuple[str, bool], Any] = {}
    order = {"SGLANG_FL_PER_OP": f"{FAMILIES[WRONG][2]}=impl:vendor.wrong"}
    for family, wrong in [*((family, False) for family in DRAWN), (WRONG, True)]:
        engine = {**SIZES, "port": free_port()}  # ranks of two engines would meet at ports that follow the same one
        steps, variables = ((STEP,), {**PLUGINS, **order}) if wrong else ((STEP, STEP), PLUGINS)
        runs[family, wrong] = start(checkpoint(family), *steps, variables=variables, engine=engine)
    return lambda family, wrong=False: runs[family, wrong].result()


@pytest.mark.parametrize("family", DRAWN)
def test_the_tokens_are_those_of_hugging_face(
    family: str, result: Runs, expected: Callable[[str], list[list[int]]]
) -> None:
    first, again = result(family)["steps"]
    assert first["tokens"] == again["tokens"] == expected(family)
    assert first["cached"] == [0] * len(PROMPTS)
    assert max(again["cached"]) >= 320


@pytest.mark.parametrize("family", DRAWN)
def test_each_rank_attends_for_requests_of_its_own(family: str, result: Runs) -> None:
    first, _ = result(family)["steps"]
    assert set(first["ranks"]) == {0, 1}


@pytest.mark.parametrize("family", DRAWN)
def test_all_layers_of_each_rank_are_ours(family: str, result: Runs) -> None:
    records, (shared, count, _) = result(family)["records"], FAMILIES[family]
    assert [record["rank"] for record in records] == [0, 1]
    assert len({record["pid"] for record in records}) == 2
    for record in records:
        assert record["layers"][shared][1] == count
        assert record["native"] == record["undispatched"] == {}
        assert record["choices"]["failed"] == []


def test_a_wrong_attention_changes_the_tokens_of_each_rank(
    result: Runs, expected: Callable[[str], list[list[int]]]
) -> None:
    (step,) = result(WRONG, True)["steps"]
    assert set(step["ranks"]) == {0, 1}
    for got, right in zip(step["tokens"][:3], expected(WRONG), strict=False):  # the last prompt is one token
        assert got != right


# -- without an engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_offset", [False, True])
def test_rows_are_copied_where_no_triton_kernel_runs(scheduler: None, from_offset: bool) -> None:
    from sglang.srt.layers import dp_attention

    every, own = torch.arange(12.0).view(6, 2), 100 + torch.arange(8.0).view(4, 2)
    target, source = (own.clone(), every) if from_offset else (every.clone(), own)
    dp_attention.memcpy(target, source, 0, torch.tensor(2), torch.tensor(3), from_offset)
    if from_offset:
        assert torch.equal(target, torch.cat((every[2:5], own[3:])))
    else:
        assert torch.equal(target, torch.cat((every[:2], own[:3], every[5:])))


def test_sglangs_kernel_copies_where_triton_runs(scheduler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_fl.ranks import data_parallel

    monkeypatch.setattr(data_parallel, "why_unserved", lambda: "")
    calls: list[Any] = []
    arguments = (torch.zeros(2, 2), torch.ones(2, 2), 0, torch.tensor(0), torch.tensor(2), False)
    data_parallel.memcpy(lambda *given: calls.append(given), *arguments)
    assert calls == [arguments]


@pytest.mark.parametrize("pins", [False, True])
def test_a_batch_pins_memory_only_where_that_is_possible(
    scheduler: None, monkeypatch: pytest.MonkeyPatch, pins: bool
) -> None:
    from sglang_fl.ranks import data_parallel

    def prepare(batch: Any, runner: Any) -> torch.Tensor:
        return torch.tensor([1, 2], pin_memory=True)

    monkeypatch.setattr(data_parallel, "detect_device", lambda: SimpleNamespace(pin_memory=pins))
    if pins:  # and this machine cannot
        with pytest.raises(RuntimeError):
            data_parallel.prepare_mlp_sync_batch(prepare, None, None)
    else:
        assert data_parallel.prepare_mlp_sync_batch(prepare, None, None).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("place", "rank"),
    [
        ({"dp_rank": None, "attn_dp_size": 1}, 1),
        ({"dp_rank": 1, "attn_dp_size": 1}, 5),  # the second of two replicas, each of four ranks
        ({"dp_rank": 1, "attn_dp_size": 2}, 1),  # the second of two groups of one replica
    ],
)
def test_a_rank_has_a_number_of_its_own(
    scheduler: None, monkeypatch: pytest.MonkeyPatch, place: dict[str, Any], rank: int
) -> None:
    from sglang.srt import runtime_context

    from sglang_fl import report

    here = SimpleNamespace(tp_rank=1, tp_size=2, pp_rank=0, pp_size=2, **place)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: here)
    assert report.own_rank() == rank


@pytest.mark.parametrize("arguments", [{"dp_size": 2}, {"dp_size": 1, "attn_dp_size": 2}])
def test_a_report_of_a_data_parallel_engine_is_refused(scheduler: None, arguments: dict[str, int]) -> None:
    from sglang_fl import report

    engine: Any = SimpleNamespace(server_args=SimpleNamespace(tp_size=2, pp_size=1, **arguments))
    for ask in (report.collect, report.set_counting):
        with pytest.raises(RuntimeError, match="SGLang collects no reports from a data-parallel engine"):
            ask(engine)

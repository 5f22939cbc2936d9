"""In SGLang a request with NaN in its logits ends alone, with its origin, or is read again; nothing of it stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import distribution, start

from fl_dispatch.hosting.records import metrics
from fl_dispatch.hosting.records.runs import PAUSE, recorded
from poison import ORIGIN, POISON, SAID, variables
from running import PROMPTS

pytestmark = pytest.mark.engine

TWO_BY_TWO = {"tp_size": 2, "pp_size": 2}
"""Two stages of two ranks each."""
PIECES = {"cuda_graph_backend_prefill": "breakable"}
"""Prompts run from graphs, which a stand-in records on a CPU."""
COMMON = PROMPTS[2][:48]
POISONED = [*COMMON, POISON, *PROMPTS[1]]
INNOCENT = [*COMMON, *PROMPTS[1]]

SEVERAL: dict[str, Any] = {}
"""An engine that makes several steps per scheduler call."""


def asked(*prompts: list[int]) -> dict[str, Any]:
    return {"prompts": prompts, "max_tokens": 16, "apart": True}


def captured(folder: Path, given: dict[str, str]) -> dict[str, str]:
    """Variables of an engine with graphs of prompts, instead of those given."""
    folder.mkdir()
    return {
        "PYTHONPATH": distribution(folder, "recorded_graphs:load"),
        "VLLM_FL_PLUGIN_MODULES": f"{given['VLLM_FL_PLUGIN_MODULES']},linear_plugin",
        "VLLM_FL_PER_OP": f"{given['VLLM_FL_PER_OP']};linear=impl:vendor.products|reference",
        "VLLM_FL_PREFER": "reference",
    }


@pytest.mark.parametrize(
    ("engine", "where"),
    [({}, ""), ({"chunked_prefill_size": 32}, ""), (PIECES, ""), ({"tp_size": 2}, "1"), (TWO_BY_TWO, "1")],
    ids=["one rank", "chunks", "prompts from graphs", "one of two", "one of a stage's two"],
)
def test_a_request_with_nan_ends_alone_with_its_origin_and_nothing_of_it_stays(
    engine: dict[str, Any],
    where: str,
    checkpoint: Callable[[str], Path],
    expected: Callable[[str], list[list[int]]],
    tmp_path: Path,
) -> None:
    model, right = checkpoint("qwen3"), expected("qwen3")
    fresh, steps = asked(INNOCENT, PROMPTS[2]), (asked(*PROMPTS[:2], POISONED), asked(POISONED))
    given = variables(model, tmp_path, XDG_STATE_HOME=str(tmp_path), **({"POISON_RANK": where} if where else {}))
    if engine is PIECES:
        given |= captured(tmp_path / "plugin", given)
    found = start(model, fresh, *steps, fresh, variables=given, engine=engine, linger=2 * PAUSE).result()
    before, first, second, after = (step["answers"] for step in found["steps"])
    assert first[:2] == right[:2]
    assert SAID in first[2]
    assert SAID in second[0]
    assert bool(found["report"]["prompt_graphs"]) == (engine is PIECES)
    assert "paged_attention" not in first[2] + second[0]  # it reads the damage from the cache
    assert before == after
    assert after[1] == right[2]
    told = [sample for one in metrics._metrics(recorded(tmp_path / "fl_dispatch/runs")) for sample in one.samples]
    counted = [(one.labels, one.value) for one in told if one.name == "fl_damage_total"]
    assert [({**labels, "rank": ""}, times) for labels, times in counted] == [({**ORIGIN, "rank": ""}, 2)]


@pytest.mark.parametrize(
    ("engine", "times", "in_answer"),
    [
        ({}, 1, False),
        ({}, 1, True),
        ({"disable_overlap_schedule": True}, 1, True),
        (SEVERAL, 1, True),
        ({}, 9, True),
        (TWO_BY_TWO, 1, True),
        ({"pp_size": 2}, 9, True),
    ],
    ids=["prompt", "answer", "without overlap", "several steps", "for good", "two by two ranks", "stages, for good"],
)
def test_a_request_that_becomes_nan_is_read_again_and_ends_if_it_becomes_so_again(
    engine: dict[str, Any],
    times: int,
    in_answer: bool,
    checkpoint: Callable[[str], Path],
    expected: Callable[[str], list[list[int]]],
    tmp_path: Path,
) -> None:
    model, right = checkpoint("qwen3"), expected("qwen3")
    others = {token for text in (*PROMPTS, *right[:2]) for token in text}
    token = next(token for token in right[2][2:-2] if token not in others) if in_answer else POISON
    prompt = PROMPTS[2] if in_answer else POISONED
    steps = {"VLLM_FL_STEPS": "8", "VLLM_FL_STEPS_MS": "10000"} if engine is SEVERAL else {}
    given = variables(model, tmp_path, token, POISON_TIMES=str(times), **steps)
    found = start(model, asked(*PROMPTS[:2], prompt), asked(prompt), variables=given, engine=engine).result()
    first, second = (step["answers"] for step in found["steps"])
    assert first[:2] == right[:2]
    if times > 1:
        assert SAID in first[2]
    else:
        assert first[2] == (right[2] if in_answer else second[0])
        assert found["log"].count("it is read again, watched") == engine.get("pp_size", 1) * engine.get("tp_size", 1)


def test_two_requests_that_become_nan_at_once_each_end_with_their_own_origin(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    model, right = checkpoint("qwen3"), expected("qwen3")
    poisoned = PROMPTS[2][100:191]
    given = variables(model, tmp_path, POISON_LENGTH=str(len(poisoned)), XDG_STATE_HOME=str(tmp_path))
    given["VLLM_FL_PLUGIN_MODULES"] += ",poisoned_attention"
    given["VLLM_FL_PER_OP"] += ";paged_attention=vendor:poisoned|reference"
    engine = {"chunked_prefill_size": 256}  # one step reads all prompts
    steps = (asked(PROMPTS[0], POISONED, poisoned, PROMPTS[1]), asked(poisoned, POISONED))
    found = start(model, *steps, variables=given, engine=engine).result()
    first, second = (step["answers"] for step in found["steps"])
    attention = "they began in 'paged_attention' by 'vendor.poisoned' in model.layers.0.self_attn.attn"
    assert [first[0], first[3]] == right[:2]
    for by_norm, by_attention in (first[1:3], second[::-1]):
        assert by_norm.endswith(SAID)
        assert by_attention.endswith(attention)

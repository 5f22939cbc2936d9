"""An engine that sleeps gives memory back and answers the same afterwards, and a trainer's weights reach it live."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MAX_TOKENS, PROMPTS, Runs, expected_tokens, start_features

import drafters
import variants
from vllm_fl.worker import sleep

CACHE = 256 << 20
GENERATE = {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}}
WEIGHTS = ["weights"]
RELOADED = [
    {"do": "sleep", "level": 2},
    {"do": "wake_up", "tags": WEIGHTS},
    {"do": "rpc", "method": "reload_weights", "args": []},
    {"do": "wake_up", "tags": ["kv_cache"]},
]
TRAINING = {"rounds": 4, "samples": 16, "max_tokens": 8}
BACKENDS = ("fl_shm", "fl_gloo")
FAMILIES = ("qwen3", "deepseek_v32")
SENT = [(FAMILIES[0], backend) for backend in BACKENDS] + [(FAMILIES[1], BACKENDS[0])]
"""Which family gets weights through which backend."""
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


@pytest.fixture(scope="module")
def other(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("live")
    return cache(lambda family: variants.other_weights(checkpoint(family), folder / family))


def _info(backend: str) -> dict[str, Any]:
    """How a trainer and the worker meet; several chunks, or a free port."""
    if backend == "fl_shm":
        return {"chunk": 50_000}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"master_address": "127.0.0.1", "master_port": free.getsockname()[1], "world_size": 2}


def _send(backend: str, *folders: Path, draft: bool = False) -> dict[str, Any]:
    """Send checkpoints to the model, or to the draft model."""
    paths = [str(path) for path in folders]
    return {"do": "transfer", "backend": backend, "folders": paths, "info": _info(backend), "draft": draft}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a trainer leaves what it learnt."""
    return tmp_path_factory.mktemp("learnt")


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path], other: Callable[[str], Path], learnt: Path) -> Runs:
    model = checkpoint("qwen3")
    steps = [GENERATE, {"do": "sleep", "level": 1}, {"do": "wake_up"}, GENERATE, *RELOADED, GENERATE]
    how = {"enable_sleep_mode": True, "kv_cache_memory_bytes": CACHE}
    sleeping = start_features(*((checkpoint(family), steps, how) for family in FAMILIES))
    jobs = []
    for family, backend in SENT:
        own, new = checkpoint(family), other(family)
        how = {"weight_transfer_config": {"backend": backend}}
        jobs.append((own, [GENERATE, _send(backend, new), GENERATE, _send(backend, new, own), GENERATE], how))
    loop = {"do": "train", "folder": str(model), "target": str(learnt), "prompts": PROMPTS[:2], **TRAINING}
    jobs.append((model, [loop, GENERATE], {"weight_transfer_config": {"backend": "fl_shm"}}))
    return Runs({"sleep": sleeping, "transfer": start_features(*jobs)})


@pytest.fixture(scope="module")
def predicting(
    checkpoint: Callable[[str], Path], other: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """A model with a predictor that reads tokens as the model does, and the same with other weights."""
    folder = tmp_path_factory.mktemp("predicting")
    models = (checkpoint(FAMILIES[1]), other(FAMILIES[1]))
    return [drafters.with_reader(model, folder / str(index)) for index, model in enumerate(models)]


@pytest.fixture(scope="module")
def drafted(predicting: list[Path]) -> list[list[Any]]:
    """The steps of an engine that gets the other weights, and of one that has them from the start."""
    own, new = predicting
    asked = [GENERATE, {"do": "metrics", "contains": ACCEPTED}]
    sent = [_send("fl_shm", new, draft=draft) for draft in (False, True)]
    steps = [*asked, *RELOADED, *asked, sent[0], *asked, sent[1], *asked]

    def engine(model: Path) -> dict[str, Any]:
        return {
            "enable_sleep_mode": True,
            "sleep_preserve_parameter_names": ["draft.*"],
            "weight_transfer_config": {"backend": "fl_shm"},
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "model": str(model)},
        }

    started = start_features((own, steps, engine(own)), (new, asked, engine(new)))
    return [run["steps"] for run in started.result()["runs"]]


@pytest.fixture(scope="module")
def slept(results: Runs) -> Callable[[str], list[Any]]:
    return lambda family: list(results["sleep"]["runs"][FAMILIES.index(family)]["steps"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", [1, 2])
def test_tokens_are_equal_after_sleep(
    level: int, family: str, slept: Callable[[str], list[Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    steps = slept(family)
    assert _tokens(steps[0]) == _tokens(steps[{1: 3, 2: 8}[level]]) == expected(family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_has_given_its_caches_memory_back(
    level: int, family: str, slept: Callable[[str], list[Any]]
) -> None:
    memory = slept(family)[{1: 1, 2: 4}[level]]
    assert memory["before"] - memory["after"] > 0.9 * CACHE
    assert (memory["weights"] == 0) == (level == 2)


def test_weights_that_the_user_keeps_are_not_given_back() -> None:
    model = torch.nn.ModuleDict({"kept": torch.nn.Linear(2, 3), "other": torch.nn.Linear(2, 3)})
    given = sleep.weight_tensors(model, ["kept.w*", "kept.weight", "draft.*"])
    assert [id(tensor) for tensor in given] == [id(model["kept"].bias), *map(id, model["other"].parameters())]
    with pytest.raises(ValueError, match=r"no parameter matches 'absent\.\*'"):
        sleep.weight_tensors(model, ["absent.*"])


def test_memory_that_is_taken_again_is_the_same_tensors_empty() -> None:
    memory, whole = sleep.Memory(), torch.ones(4, 3)
    part = whole[1:]
    memory.give_back(sleep.CACHE, [whole, part])
    assert whole.untyped_storage().nbytes() == 0
    memory.take([sleep.WEIGHTS])
    assert whole.untyped_storage().nbytes() == 0
    memory.take(None)
    assert torch.equal(whole, torch.zeros(4, 3))
    part.fill_(2.0)
    assert whole.sum() == 18.0


@pytest.mark.parametrize(("family", "backend"), SENT)
def test_a_trainers_weights_reach_the_engine(
    family: str,
    backend: str,
    results: Runs,
    other: Callable[[str], Path],
    expected: Callable[[str], list[list[int]]],
) -> None:
    steps = results["transfer"]["runs"][SENT.index((family, backend))]["steps"]
    before, changed, back = (_tokens(steps[place]) for place in (0, 2, 4))
    assert changed == expected_tokens(other(family)) != before
    assert before == back == expected(family)


def test_a_predictor_is_kept_beside_reloaded_weights_and_gets_a_trainers_weights_in_an_update_of_its_own(
    drafted: list[list[Any]], predicting: list[Path]
) -> None:
    """vLLM neither reloads nor updates it with its model."""
    updated, (answers, accepted) = drafted
    asked = [place for place, step in enumerate(updated) if isinstance(step, dict) and ACCEPTED in step]
    own, new = map(expected_tokens, predicting)
    assert [_tokens(updated[place - 1]) for place in asked] == [own, own, new, new]
    assert _tokens(answers) == new
    counts = [updated[place][ACCEPTED] for place in asked]
    first, reloaded, stale, sent = (after - before for before, after in itertools.pairwise((0, *counts)))
    assert first == reloaded > 2 * stale
    assert sent == accepted[ACCEPTED] > 2 * stale


def test_a_training_loop_gets_completions_with_its_own_log_probabilities_and_the_engine_learns(
    results: Runs, learnt: Path, expected: Callable[[str], list[list[int]]]
) -> None:
    trained, completions = results["transfer"]["runs"][len(SENT)]["steps"]
    assert max(trained["apart"]) < 1e-3
    assert trained["rewards"][-1] > trained["rewards"][0] + 0.2
    assert _tokens(completions) == expected_tokens(learnt) != expected("qwen3")

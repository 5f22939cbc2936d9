"""Several steps per scheduler call give SGLang's tokens of one step for each, whatever requests ask for.

Requests are greedy: SGLang draws all samples of a batch from one generator, so they depend on when requests arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving import start

import variants
from running import PROMPTS

pytest.importorskip("sglang")

from sglang_fl.speculation import several_steps

MOST = 16
"""The largest number: SGLang's tables of slots are just long enough for it."""
NEW = 40
VARIABLES = {"VLLM_FL_STEPS_MS": "10000", "SGLANG_FL_PLUGIN_MODULES": "uneven_pace"}
"""The time of a step bounds no number of steps, but the second rank's."""
ENGINE = {"grammar_backend": "xgrammar", "disable_overlap_schedule": True}
"""With overlap, SGLang applies a penalty for a token one token late."""
ENDS = list(range(3, 260, 9))
"""Tokens that end a request: some request meets one."""
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
CROWD = [PROMPTS[2][7 * place :][:185] for place in range(4)]
ROOM, PAGE = 416, 16
"""Tokens of a cache that holds two of those prompts, and of its pages."""


def ask(more: Mapping[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    return {"prompts": PROMPTS, "max_tokens": NEW, "sampling": sampling, **({"more": more} if more else {})}


SCORED = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 9]}
ASKED: Mapping[str, dict[str, Any]] = {
    "greedy": ask(SCORED),
    "top-k, top-p and min-p": ask(SCORED, temperature=0.7, top_k=1, top_p=0.9, min_p=0.01),
    "penalties": ask(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3),
    "biased tokens": ask(logit_bias={"20": -100.0}),
    "end tokens": ask(SCORED, stop_token_ids=ENDS, ignore_eos=False),
    "a least length": ask(stop_token_ids=ENDS, ignore_eos=False, min_new_tokens=17),
    "a length that is no multiple": ask(max_new_tokens=13),
    "stop strings": ask(stop=LETTERS),
    "a grammar": ask(regex="[a-c]{3}-[0-9]{2}", ignore_eos=False),
    "samples": ask(n=2, temperature=0.0),
    "a cached prefix": ask(),
}
"""Subject → a step of ``run_sglang``."""
CROWDED = {"prompts": CROWD, "max_tokens": NEW}
FILLING = {"prompts": [PROMPTS[2]], "max_tokens": 512 - 1 - len(PROMPTS[2])}
"""A request that has more tokens in the end than that cache."""
LONGEST = {"prompts": [PROMPTS[2]], "max_tokens": 512 - 1 - len(PROMPTS[2])}
"""An answer up to the length that the engine allows."""


@pytest.fixture(scope="module")
def answers(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Steps of a scheduler call → the results of three engines: all requests, requests short of room, two ranks."""
    folder = tmp_path_factory.mktemp("several")
    model = variants.with_characters(checkpoint("qwen3"), folder / "qwen3")
    runs: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
        ([*ASKED.values(), LONGEST], {}),
        ([CROWDED, FILLING], {"max_total_tokens": ROOM, "page_size": PAGE, "max_running_requests": 4}),
        ([ASKED["greedy"]], {"tp_size": 2}),
    ]
    started: dict[str, list[Future[dict[str, Any]]]] = {
        name: [
            start(model, *steps, engine={**ENGINE, **engine}, variables={**VARIABLES, "VLLM_FL_STEPS": most})
            for steps, engine in runs
        ]
        for name, most in {"one": "1", "several": str(MOST)}.items()
    }
    return {name: [each.result() for each in every] for name, every in started.items()}


def compared(answers: dict[str, list[dict[str, Any]]], run: int, place: int) -> tuple[dict[str, Any], dict[str, Any]]:
    one, several = (answers[name][run]["steps"][place] for name in ("one", "several"))
    return one, several


def scores(step: Mapping[str, Any]) -> list[float]:
    """All log-probabilities of answers: of the tokens, the best ones and those asked for."""
    found: list[float] = []
    for meta in step["metas"]:
        found += [score for score, *_ in meta["output_token_logprobs"]]
        for name in ("output_top_logprobs", "output_token_ids_logprobs"):
            found += [score for row in meta[name] for score, *_ in row]
    return found


@pytest.mark.parametrize("subject", ASKED)
def test_requests_get_what_single_steps_give_them(subject: str, answers: dict[str, Any]) -> None:
    one, several = compared(answers, 0, list(ASKED).index(subject))
    assert several["tokens"] == one["tokens"]
    assert several["texts"] == one["texts"]
    if one["metas"]:
        assert scores(several) == pytest.approx(scores(one), abs=1e-4)
        lengths = [[len(meta["output_token_logprobs"]) for meta in step["metas"]] for step in (one, several)]
        assert lengths[0] == lengths[1] == list(map(len, one["tokens"]))


def test_schedulings_made_several_steps_in_every_engine_and_rank(answers: dict[str, Any]) -> None:
    for run, ranks in enumerate((1, 1, 2)):
        made = [report["steps"] for report in answers["several"][run]["reports"]]
        assert len(made) == ranks
        assert all(each == made[0] for each in made)
        assert made[0][str(MOST)] > 0
    assert answers["one"][0]["report"]["steps"] is None


def test_requests_end_where_single_steps_end_them(answers: dict[str, Any]) -> None:
    """The comparisons say something only if some request ends early."""
    for subject in ("end tokens", "stop strings"):
        _, several = compared(answers, 0, list(ASKED).index(subject))
        assert min(map(len, several["tokens"])) < NEW
    _, least = compared(answers, 0, list(ASKED).index("a least length"))
    assert min(map(len, least["tokens"])) >= 17


def test_an_answer_is_as_long_as_the_engine_allows(answers: dict[str, Any]) -> None:
    one, several = compared(answers, 0, len(ASKED))
    assert several["tokens"] == one["tokens"]
    assert 512 - 8 < len(PROMPTS[2]) + len(several["tokens"][0]) < 512


def test_requests_that_wait_for_room_get_the_tokens_of_single_steps(answers: dict[str, Any]) -> None:
    one, several = compared(answers, 1, 0)
    assert several["tokens"] == one["tokens"]
    assert int(answers["several"][1]["report"]["steps"]["1"]) > 1


def test_a_request_that_fills_the_cache_ends_where_there_are_no_slots_for_further_steps(
    answers: dict[str, Any],
) -> None:
    (one,), (several,) = (step["tokens"] for step in compared(answers, 1, 1))
    assert several == one[: len(several)]
    assert len(one) - len(several) <= MOST + PAGE


def test_ranks_get_the_tokens_of_single_steps(answers: dict[str, Any]) -> None:
    one, several = compared(answers, 2, 0)
    assert several["tokens"] == one["tokens"]


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"speculative_algorithm": several_steps.NAME}, ""),
        ({"speculative_algorithm": several_steps.NAME.lower()}, ""),
        ({"speculative_algorithm": "NGRAM"}, "a draft already makes several tokens"),
        ({"is_generation": False}, "the model generates nothing"),
        ({"is_multimodal": True}, "the model takes images or audio"),
        ({"hf_text_config": SimpleNamespace(index_topk=20)}, "the model has sparse latent attention"),
        ({"pp_size": 2}, "pipeline stages hand over each step"),
        ({"dp_size": 2}, "data-parallel ranks run each step together"),
        ({"enable_mixed_chunk": True}, "prompts and decoding share steps"),
        (
            {"enable_lora": True},
            "SGLang refuses adapters (check_lora_speculative_compatibility in arg_groups/lora_hook.py)",
        ),
    ],
)
def test_an_engine_that_cannot_make_several_steps_says_why(
    given: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.arg_groups import overrides
    from sglang.srt.configs import hybrid_arch

    model: dict[str, Any] = {
        "is_generation": True,
        "is_encoder_decoder": False,
        "is_multimodal": False,
        "hf_text_config": SimpleNamespace(),
    }
    args = {
        "speculative_algorithm": None,
        "dllm_algorithm": None,
        "pp_size": 1,
        "dp_size": 1,
        "enable_mixed_chunk": False,
        "enable_eplb": False,
        "enable_watermark": False,
        "enable_lora": False,
        "lora_paths": None,
        "disaggregation_mode": "null",
    }
    for name, value in given.items():
        (model if name in model else args)[name] = value
    monkeypatch.setattr(overrides, "model_config_of", lambda _: SimpleNamespace(**model))
    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda _: None)
    assert several_steps.why_single(SimpleNamespace(**args)) == why  # type: ignore[arg-type]


def _request(**given: Any) -> SimpleNamespace:
    """A request that needs nothing of the host, except for what is given."""
    sampling = {"max_new_tokens": 9, "stop_strs": [], "stop_regex_strs": []}
    own = {"grammar": None, "custom_logit_processor": None, "return_hidden_states": False, "output_ids": [1, 2]}
    for name, value in given.items():
        (sampling if name in sampling else own)[name] = value
    return SimpleNamespace(sampling_params=SimpleNamespace(**sampling), **own)


@pytest.mark.parametrize(
    ("given", "waiting", "penalties", "length", "most"),
    [
        ({}, [], False, 20, 7),
        ({"max_new_tokens": 200}, [], False, 20, several_steps.LARGEST),
        ({"max_new_tokens": 200}, [], False, 508, 4),
        ({}, ["another"], False, 20, 1),
        ({}, [], True, 20, 1),
        ({"grammar": "a"}, [], False, 20, 1),
        ({"stop_strs": ["a"]}, [], False, 20, 1),
        ({"stop_regex_strs": ["a"]}, [], False, 20, 1),
        ({"custom_logit_processor": "a"}, [], False, 20, 1),
        ({"return_hidden_states": True}, [], False, 20, 1),
    ],
)
def test_a_batch_makes_the_steps_that_its_requests_allow(
    given: dict[str, Any],
    waiting: list[str],
    penalties: bool,
    length: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(several_steps, "largest", lambda: several_steps.LARGEST)
    config = SimpleNamespace(context_len=512)
    scheduler = SimpleNamespace(waiting_queue=waiting, max_running_requests=4, model_config=config)
    required = SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=penalties))
    batch = SimpleNamespace(reqs=[_request(**given)], sampling_info=required, seq_lens_cpu=torch.tensor([length]))
    assert several_steps.most_steps(scheduler, batch) == most  # type: ignore[arg-type]


def test_a_request_is_damaged_if_one_of_its_steps_is() -> None:
    from sglang_fl.worker import damage

    first, last = (SimpleNamespace() for _ in range(2))
    damage.DAMAGED.give(first, (damage.Damaged(torch.tensor([0, 1, 0])),))
    damage.DAMAGED.give(last, (damage.Damaged(torch.tensor([0, 0, 1])),))
    damage.join([first, last])  # type: ignore[list-item]
    assert damage._rows(SimpleNamespace(logits_output=last)) == [0, 1, 1]


def test_a_model_that_cannot_make_several_steps_has_no_algorithm_though_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(several_steps, "get_settings", lambda: SimpleNamespace(steps=8))
    monkeypatch.setattr(several_steps, "why_single", lambda _: "the model generates nothing")
    args: Any = SimpleNamespace(speculative_algorithm=several_steps.NAME.lower())
    several_steps.apply_defaults(args, lambda *_: None)
    assert args.speculative_algorithm is None

"""Drafts of a model, an EAGLE head, a predictor of one more token or N-grams change no token, and no distribution.

One engine for each way to draft. SGLang counts how often drafts are checked, and how many are right.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from serving import STEP, start

import drafters
import variants
from fl_dispatch.devices import ASCEND, CPU, CUDA, detect_device
from running import MAX_TOKENS, PROMPTS, reference_network
from sampling import drawn

pytest.importorskip("sglang")

from sglang_fl import speculation
from sglang_fl.platform import refusals
from sglang_fl.speculation import kernel_hooks


class Run(NamedTuple):
    """The model that is drafted for, SGLang's name of the way, its further arguments, and the size of a page."""

    target: str
    algorithm: str
    arguments: dict[str, Any]
    page: int = 1


TREE = {"speculative_eagle_topk": 2}
RUNS = {
    "draft_model": Run("qwen3", "STANDALONE", {}),
    "itself": Run("qwen3", "STANDALONE", {"speculative_num_steps": 2, "tp_size": 2}, page=16),
    "stranger": Run("qwen3", "STANDALONE", {}),
    "tree": Run("qwen3", "STANDALONE", {**TREE, "speculative_num_steps": 2, "speculative_num_draft_tokens": 7}),
    "branches": Run("llama", "EAGLE", {**TREE, "speculative_num_steps": 3, "speculative_num_draft_tokens": 6}),
    "eagle": Run("llama", "EAGLE", {}, page=16),
    "rejection": Run("llama", "EAGLE", {"speculative_use_rejection_sampling": True}),
    "eagle3": Run("llama", "EAGLE3", {}),
    "mtp": Run("deepseek_v3", "NEXTN", {"speculative_num_steps": 1}),
    "mtp_tree": Run("deepseek_v3", "NEXTN", {**TREE, "speculative_num_steps": 2, "speculative_num_draft_tokens": 5}),
    "ngram": Run("qwen3", "NGRAM", {"speculative_num_draft_tokens": 5}),
}
DRAWN = drawn(tuple(RUNS), 3, "who drafts under SGLang")
ALIKE = ("draft_model", "itself", "tree", "ngram")
"""Ways whose drafts are often right."""
SEPARATE = ("draft_model", "itself", "stranger", "tree")
"""Ways to draft by a model of its own."""
PREDICTED = (*SEPARATE, "eagle", "eagle3", "mtp")
"""Ways whose drafts Hugging Face's networks tell; a head that is not sure draws its first one.

They are all that a tree has: its first tokens, and those after each. From the third step on SGLang leaves keys where
another branch had them.
"""
SAMPLES = 800
PLUGINS = {"SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method,unwritten_memory", "SGLANG_FL_PREFER": "reference"}
WRONG = {"prefer": "reference", "per_op_order": {"rms_norm": ["impl:vendor.wrong"]}}

each = pytest.mark.parametrize("method", DRAWN)
each_predicted = pytest.mark.parametrize("method", [method for method in DRAWN if method in PREDICTED])


@pytest.fixture(scope="module")
def models(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path | None]]:
    """Method → the target and what drafts for it."""
    folder = tmp_path_factory.mktemp("drafters")
    found = drafters.under_sglang(checkpoint, folder)
    qwen = found["draft_model"][0]
    return {
        **found,
        "itself": (qwen, qwen),
        "stranger": (qwen, variants.other_weights(qwen, folder / "other")),
        "tree": found["draft_model"],
        "branches": found["eagle"],
        "rejection": found["eagle"],
        "mtp_tree": found["mtp"],
    }


SPREAD = {"temperature": drafters.TEMPERATURE, "top_k": drafters.TOP}
STEPS: tuple[dict[str, Any], ...] = (
    STEP,
    STEP,
    {"prompts": drafters.TURNS, "max_tokens": drafters.LONG},
    {"prompts": PROMPTS[:1] * SAMPLES, "max_tokens": 2, "sampling": SPREAD},
)
"""Two passes over the prompts, texts that repeat themselves, and samples."""


def engine(method: str, drafter: Path | None) -> dict[str, Any]:
    """The arguments of a method's engine."""
    run = RUNS[method]
    return {
        **run.arguments,
        "speculative_algorithm": run.algorithm,
        "page_size": run.page,
        "max_running_requests": 64,
        "max_total_tokens": 8192,
        "random_seed": 3,
        **({} if drafter is None else {"speculative_draft_model_path": str(drafter)}),
    }


@pytest.fixture(scope="module")
def result(models: dict[str, tuple[Path, Path | None]]) -> Callable[[str], dict[str, Any]]:
    """A method → :data:`STEPS`, and a wrong and a right pass."""
    steps = (*STEPS, {**STEP, "policy": WRONG}, {**STEP, "policy": {"prefer": "reference"}})
    runs = {}
    for method in DRAWN:
        target, drafter = models[method]
        runs[method] = start(target, *steps, variables=PLUGINS, engine=engine(method, drafter))
    return lambda method: runs[method].result()


@each
def test_greedy_tokens_equal_hugging_face_in_chunks_and_from_the_radix_cache(
    method: str, result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    first, second = result(method)["steps"][:2]
    assert first["tokens"] == second["tokens"] == expected(RUNS[method].target)
    assert first["cached"] == [0] * len(PROMPTS)
    assert second["cached"][2] > 300


@each
def test_long_answers_equal_hugging_face(
    method: str, result: Callable[[str], dict[str, Any]], models: dict[str, tuple[Path, Path | None]]
) -> None:
    network = reference_network(models[method][0], torch.float32)
    answers = [drafters.continued(network, turn, drafters.LONG) for turn in drafters.TURNS]
    assert result(method)["steps"][2]["tokens"] == answers


@each
def test_drafts_are_accepted_and_rejected(method: str, result: Callable[[str], dict[str, Any]]) -> None:
    steps = result(method)["steps"][:3]
    checked, right = (sum(pair[part] for step in steps for pair in step["drafts"]) for part in (0, 1))
    width = RUNS[method].arguments.get("speculative_num_draft_tokens", 1) - 1
    width = width or RUNS[method].arguments.get("speculative_num_steps", 3)
    assert right < width * checked
    if method == "stranger":
        assert right < checked / 20
    else:
        assert right > (checked / 4 if method in ALIKE else 0)


def _right(method: str, target: Any, drafter: Any, text: list[int], answer: list[int]) -> int:
    """The number of tokens after a text that are drafted.

    SGLang shows a separate model a text without its first token, as if it were a head. The small heads say again and
    again what a hidden state says that the target had before the text's last token.
    """
    if method in SEPARATE:
        best = RUNS[method].arguments.get("speculative_eagle_topk", 1)
        return drafters.drafted(drafter, text[1:], answer, best)
    with torch.no_grad():
        states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        last, norm = states[-1][0, -1], target.model.norm
        if method == "eagle3":  # of the three states that it sees, the first one
            last = norm(states[0][0, -1])
        elif method == "mtp":
            last = norm(torch.nn.functional.rms_norm(last, last.shape))
        draft = int(target.lm_head(last).argmax())
    return next((place for place, token in enumerate(answer) if token != draft), len(answer))


@each_predicted
def test_drafts_are_those_that_hugging_face_predicts(
    method: str, result: Callable[[str], dict[str, Any]], models: dict[str, tuple[Path, Path | None]]
) -> None:
    target, drafter = models[method]
    count = RUNS[method].arguments.get("speculative_num_steps", 3)
    network = reference_network(target, torch.float32)
    other = reference_network(drafter, torch.float32) if drafter is not None and "eagle" not in method else None
    for prompt, found in zip(PROMPTS, result(method)["steps"][0]["drafts"], strict=True):
        right = drafters.accepted(network, partial(_right, method, network, other), prompt, MAX_TOKENS, count)
        assert found == [len(right), sum(right)]


@each
def test_sampled_tokens_keep_the_targets_distribution(
    method: str, result: Callable[[str], dict[str, Any]], models: dict[str, tuple[Path, Path | None]]
) -> None:
    network = reference_network(models[method][0], torch.float32)
    sampled = result(method)["steps"][3]["tokens"]
    assert len(sampled) == SAMPLES
    drafters.check_pairs(network, PROMPTS[0], sampled)


@each
def test_a_wrong_implementation_changes_the_tokens_and_a_right_one_gives_them_back(
    method: str, result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    wrong, right = result(method)["steps"][4:]
    assert wrong["tokens"] != expected(RUNS[method].target)
    assert right["tokens"] == expected(RUNS[method].target)


REFUSED = {
    "steps that adapt": ({"speculative_adaptive": True}, "--speculative-adaptive"),
    "several layers": ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
    "blocks": ({"speculative_use_block_verification": True}, "--speculative-use-block-verification"),
    "a window": ({"speculative_draft_window_size": 64}, "--speculative-draft-window-size"),
    "texts": ({"speculative_ngram_external_corpus_path": "x"}, "--speculative-ngram-external-corpus-path"),
    "attention": (
        {"speculative_draft_attention_backend": "torch_native"},
        "--speculative-draft-attention-backend torch_native",
    ),
    "a cache of another type": (
        {"speculative_draft_kv_cache_dtype": "fp8_e4m3"},
        "--speculative-draft-kv-cache-dtype fp8_e4m3",
    ),
    "a quantized drafter": (
        {"speculative_draft_model_quantization": "modelopt"},
        "--speculative-draft-model-quantization modelopt",
    ),
    "a small vocabulary": ({"speculative_token_map": "tokens.pt"}, "--speculative-token-map"),
    "attention of single tokens": ({"speculative_attention_mode": "decode"}, "--speculative-attention-mode decode"),
    "adapters": ({"enable_lora": True}, "LoRA and speculative decoding with 'EAGLE'"),
    "stages": ({"pp_size": 2}, "pipeline stages and speculative decoding with 'EAGLE'"),
    "replicas": ({"dp_size": 2}, "data-parallel ranks and speculative decoding with 'EAGLE'"),
    "others": ({"speculative_algorithm": "uno"}, "speculative decoding with 'UNO'"),
}


def _asked(**given: Any) -> Any:
    """SGLang's arguments, as a user gives them."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(**{"model_path": "m", "device": "cpu", "speculative_algorithm": "EAGLE", **given})


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_covered_is_refused_in_one_sentence(case: str, scheduler: None) -> None:
    given, said = REFUSED[case]
    with pytest.raises(ValueError, match=rf"^sglang_fl does not support {said} on cpu yet \(model m\)$"):
        refusals.refuse_unsupported(_asked(**given), detect_device())


@pytest.mark.parametrize("algorithm", speculation.BOTH_WAYS)
def test_drafts_that_attend_both_ways_are_refused_with_the_line_of_sglangs(algorithm: str, scheduler: None) -> None:
    import sglang.srt

    said = f"sglang_fl does not support speculative decoding with '{algorithm}' (its drafts attend both ways: "
    with pytest.raises(ValueError, match=f"^{re.escape(said)}") as refused:
        refusals.refuse_unsupported(_asked(speculative_algorithm=algorithm.lower()), detect_device())
    found = re.search(r": (\w+) in (\S+\.py)\)", str(refused.value))
    assert found is not None
    (function,) = (
        node
        for node in ast.parse(Path(sglang.srt.__path__[0], found[2]).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == found[1]
    )
    assert "AttentionType.ENCODER_ONLY" in ast.unparse(function)


def test_drafters_of_dspark_are_those_of_dflash(scheduler: None) -> None:
    """SGLang itself asks the platform for DFLASH, and takes DSpark on CUDA, NPUs and XPUs alone."""
    import sglang.srt
    from sglang.srt.arg_groups import speculative_hook

    dspark = Path(sglang.srt.__path__[0], "models/dspark.py").read_text()
    assert "from sglang.srt.models.dflash import DFlashDraftModel" in dspark
    assert "supports_speculative_algorithm(algorithm)" in inspect.getsource(speculative_hook._handle_dflash)
    assert "only supports CUDA, NPU or XPU device" in inspect.getsource(speculative_hook._handle_dspark)


@pytest.mark.parametrize("algorithm", speculation.SERVED)
def test_drafts_are_refused_on_an_accelerator_that_sglang_has_no_kernels_for(algorithm: str, scheduler: None) -> None:
    said = f"speculative decoding with '{algorithm}' on ascend"
    with pytest.raises(ValueError, match=rf"^sglang_fl does not support {said} yet \(model m\)$"):
        refusals.refuse_unsupported(_asked(speculative_algorithm=algorithm), ASCEND)
    refusals.refuse_unsupported(_asked(speculative_algorithm=algorithm), CUDA)  # SGLang has kernels of its own for it


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"kv_cache_dtype": "bfloat16", "speculative_draft_kv_cache_dtype": "bfloat16"},
        {"quantization": "fp8", "speculative_draft_model_quantization": "fp8"},
        {"quantization": "fp8", "speculative_draft_model_quantization": "awq"},
        {"speculative_draft_model_quantization": "gptq"},
        {"speculative_draft_model_quantization": "unquant"},
    ],
)
def test_a_drafter_with_a_quantization_that_is_served_is(given: dict[str, str], scheduler: None) -> None:
    refusals.refuse_unsupported(_asked(**given), CPU)


def test_another_version_of_sglang_is_refused(scheduler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "host_version", lambda: "0.5.21")
    with pytest.raises(ValueError, match="speculative decoding with 'EAGLE' under SGLang 0.5.21 on cpu yet"):
        refusals.refuse_unsupported(_asked(), detect_device())


def test_an_algorithm_that_sglang_puts_in_the_place_of_another_is_refused() -> None:
    with pytest.raises(ValueError, match="does not support speculative decoding with 'FROZEN_KV_MTP' yet"):
        kernel_hooks.prepare("FROZEN_KV_MTP")


def test_drafts_are_chains_where_the_user_says_nothing(scheduler: None) -> None:
    changes: list[str] = []

    def change(args: Any, field: str, value: Any, reason: str) -> None:
        changes.append(field)
        setattr(args, field, value)

    model, look_up = _asked(), _asked(speculative_algorithm="NGRAM", speculative_ngram_max_bfs_breadth=4)
    steps, plain = _asked(speculative_num_steps=5), _asked(speculative_algorithm=None)
    for args in (model, look_up, steps, plain):
        speculation.apply_defaults(args, change)
    chosen = [
        (a.speculative_num_steps, a.speculative_eagle_topk, a.speculative_num_draft_tokens) for a in (model, steps)
    ]
    assert chosen == [(3, 1, 4), (5, 1, None)]
    assert look_up.speculative_ngram_max_bfs_breadth == look_up.speculative_ngram_min_bfs_breadth == 1
    assert plain.speculative_eagle_topk is None
    assert changes.count("disable_overlap_schedule") == 3
    assert model.disable_overlap_schedule
    assert not plain.disable_overlap_schedule


@each
def test_the_drafter_runs_our_operators_too(method: str, result: Callable[[str], dict[str, Any]]) -> None:
    report = result(method)["report"]
    assert report["native_layers"] == report["undispatched"] == report["failed"] == {}
    if method == "ngram":
        assert report["drafter"] is None
        return
    assert report["drafter"]["native_layers"] == report["drafter"]["undispatched"] == {}
    assert sum(report["drafter"]["attention"].values()) > 0
    assert report["drafter"]["layers"]

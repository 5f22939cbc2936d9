"""LoRA adapters give the tokens of the merged weights, alone and mixed in one batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MAX_TOKENS, PROMPTS, RUNNERS, expected_tokens, start_features
from transformers import AutoModelForCausalLM

import variants
from sampling import drawn

SHORT = {"max_tokens": MAX_TOKENS}
SCORED = {"max_tokens": 2, "prompt_logprobs": 1}


@pytest.fixture(scope="module")
def adapters(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [variants.adapter(checkpoint("qwen3"), folder / name, seed) for name, seed in (("one", 1), ("two", 2))]


@pytest.fixture(scope="module")
def head(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the projection to the vocabulary, besides the others."""
    folder = tmp_path_factory.mktemp("head")
    return variants.adapter(checkpoint("qwen3"), folder / "three", 3, adapted=(*variants.ADAPTED, "lm_head"))


@pytest.fixture(scope="module")
def merged_tokens(
    checkpoint: Callable[[str], Path], adapters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> list[list[list[int]]]:
    """Hugging Face's tokens of the weights merged with each adapter."""
    folder = tmp_path_factory.mktemp("merged")
    return [expected_tokens(variants.merged(checkpoint("qwen3"), path, folder / path.name)) for path in adapters]


@pytest.fixture(scope="module", params=drawn(tuple(RUNNERS), 1, "model runner with adapters"))
def run(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], adapters: list[Path], head: Path
) -> dict[str, Any]:
    one, two, heads = *map(str, adapters), str(head)
    shared, mixed = PROMPTS[2], [heads, None, one, heads, None, two]
    alone = list(zip(PROMPTS[:2] * 3, mixed, strict=True))
    steps = [
        {"do": "generate", "prompts": PROMPTS, "sampling": SHORT, "lora": [one] * len(PROMPTS)},
        {"do": "generate", "prompts": PROMPTS * 3, "sampling": SHORT, "lora": [one, two, None] * len(PROMPTS)},
        {"do": "reset_prefix_cache"},
        {"do": "generate", "prompts": [shared], "sampling": SHORT, "lora": [one]},
        {"do": "generate", "prompts": [shared] * 2, "sampling": SHORT, "lora": [one, two]},
        {"do": "generate", "prompts": [shared], "sampling": SHORT},
        {"do": "generate", "prompts": PROMPTS[:2] * 3, "sampling": SCORED, "lora": mixed},
        *({"do": "generate", "prompts": [prompt], "sampling": SCORED, "lora": [lora]} for prompt, lora in alone),
    ]
    engine = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "max_num_seqs": 6}
    (found,) = start_features((checkpoint("qwen3"), steps, engine), **RUNNERS[request.param]).result()["runs"]
    assert found["report"]["model_runner"] == request.param
    return found


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


def test_an_adapter_gives_the_tokens_of_the_merged_weights(
    run: dict[str, Any], merged_tokens: list[list[list[int]]], expected: Callable[[str], list[list[int]]]
) -> None:
    assert _tokens(run["steps"][0]) == merged_tokens[0]
    assert merged_tokens[0] != merged_tokens[1]
    assert expected("qwen3") not in merged_tokens


def test_two_adapters_and_none_mix_in_one_batch(
    run: dict[str, Any], merged_tokens: list[list[list[int]]], expected: Callable[[str], list[list[int]]]
) -> None:
    weights = [*merged_tokens, expected("qwen3")]
    found = _tokens(run["steps"][1])
    wrong = {index: tokens for index, tokens in enumerate(found) if tokens != weights[index % 3][index % len(PROMPTS)]}
    assert wrong == {}


def test_a_prefix_is_shared_within_an_adapter_only(run: dict[str, Any]) -> None:
    first, both, plain = run["steps"][3:6]
    assert first[0]["cached"] == 0
    assert [output["cached"] > 0 for output in both] == [True, False]
    assert plain[0]["cached"] == 0


def test_our_operators_ran_around_the_adapted_projections(run: dict[str, Any]) -> None:
    operators = {key.split(" ")[0] for key in run["report"]["counts"]}
    assert {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"} <= operators
    assert run["report"]["native_layers"] == {}


def test_prompt_logprobs_are_those_of_each_requests_own_adapter(
    run: dict[str, Any], checkpoint: Callable[[str], Path], head: Path, tmp_path: Path
) -> None:
    together, *alone = run["steps"][6], *(output for (output,) in run["steps"][7:])
    assert len(together) == len(alone) == 6
    for mixed, single in zip(together, alone, strict=True):
        assert mixed["tokens"] == single["tokens"]
        for found, wanted in zip(mixed["prompt_logprobs"][1:], single["prompt_logprobs"][1:], strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)
    network = AutoModelForCausalLM.from_pretrained(variants.merged(checkpoint("qwen3"), head, tmp_path / "merged"))
    scores = network(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1)
    for place, found in enumerate(together[0]["prompt_logprobs"][1:]):
        assert found == pytest.approx({token: scores[place, int(token)].item() for token in found}, rel=1e-4, abs=1e-3)


def _wrapper(prefill: bool, requests: list[int], tokens: list[int]) -> Any:
    """vLLM's metadata for requests and tokens of adapters 1 and 2, and of none (0)."""
    from vllm.lora.layers import LoRAMapping

    from vllm_fl.lora import PunicaWrapperFL

    wrapper = PunicaWrapperFL(16, 4, "cpu")
    mapping = LoRAMapping(index_mapping=tuple(tokens), prompt_mapping=tuple(requests), is_prefill=prefill)
    wrapper.update_metadata(mapping, [1, 2], 2, 100)
    return wrapper


@pytest.mark.parametrize("prefill", [False, True])
def test_tokens_without_an_adapter_get_nothing_from_fully_sharded_layers(prefill: bool) -> None:
    wrapper = _wrapper(prefill, [2, 0, 1], [2, 2, 0, 1])
    torch.manual_seed(0)
    x, down, up = torch.randn(4, 8), torch.randn(2, 1, 3, 8), torch.randn(2, 1, 6, 3)
    products, output = torch.zeros(1, 4, 3), torch.zeros(4, 6)
    wrapper.add_shrink(products, x, (down,), 2.0)
    wrapper.add_expand(output, products, (up,), (6,), add_inputs=True)
    wanted = torch.stack(
        [torch.zeros(6) if i < 0 else 2 * up[i, 0] @ down[i, 0] @ row for i, row in zip((1, 1, -1, 0), x, strict=True)]
    )
    torch.testing.assert_close(output, wanted)


def test_the_logits_of_a_prompt_get_the_adapter_of_its_tokens() -> None:
    from vllm_fl.lora import prompt_logits

    wrapper = _wrapper(True, [2, 0, 1], [2, 2, 0, 0, 0, 1])
    torch.manual_seed(0)
    x, down, up = torch.randn(3, 8), torch.randn(2, 1, 3, 8), torch.randn(2, 1, 6, 3)
    by_request, of_the_base, of_two = torch.zeros(3, 6), torch.zeros(3, 6), torch.zeros(2, 6)
    wrapper.add_lora_logits(by_request, x, down, up, 1.0)
    with prompt_logits(2):
        wrapper.add_lora_logits(of_the_base, x, down, up, 1.0)
    with prompt_logits(0):
        wrapper.add_lora_logits(of_two, x[:2], down, up, 1.0)
    torch.testing.assert_close(
        by_request[[0, 2]], torch.stack([up[1, 0] @ down[1, 0] @ x[0], up[0, 0] @ down[0, 0] @ x[2]])
    )
    assert not by_request[1].any()
    assert not of_the_base.any()
    torch.testing.assert_close(of_two, x[:2] @ down[1, 0].T @ up[1, 0].T)
    with pytest.raises(RuntimeError, match="2 rows of logits"):
        wrapper.add_lora_logits(of_two, x[:2], down, up, 1.0)

"""LoRA adapters give the tokens of the merged weights, alone and mixed in one batch, eagerly and compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines import MAX_TOKENS, PROMPTS, RUNNERS, ran, start_features
from transformers import AutoModelForCausalLM

import drafters
import variants
from adapters import MIX, MIXED, Adapters, Run, Wanted, mixed
from host_engines import Call, Pass, Served
from sampling import drawn

SHORT = {"max_tokens": MAX_TOKENS}
SCORED = {"max_tokens": 2, "prompt_logprobs": 1}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_num_seqs": 6}
EAGER, COMPILED = {"enforce_eager": True}, {"enforce_eager": False}
PIECES = {**COMPILED, "compilation_config": {"mode": "VLLM_COMPILE", "backend": "eager"}}
RUNS = [
    Run(f"{runner}, {name}", {**LORA, **how, "max_loras": 3}, RUNNERS[runner])
    for name, how, drawing in (
        ("eager", EAGER, "model runner with adapters"),
        ("compiled", COMPILED, "compiled with adapters"),
        ("pieces", PIECES, "pieces with adapters"),
    )
    for runner in drawn(tuple(RUNNERS), 1, drawing)
]
SCORED_PROMPTS, SCORED_WITH = PROMPTS[:2] * 3, ("head", None, "one", "head", None, "two")
LOOK_UP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFTS = {
    f"{method}, {name}": (method, how)
    for method in ("ngram", "draft_model", "eagle")
    for name, how in (("eager", EAGER), ("compiled", COMPILED))
}
DRAFTED = drawn(tuple(DRAFTS), 2, "drafts with adapters")
WRONG = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin", "VLLM_FL_PREFER": "reference"}


def _paths(adapter: Callable[[str], Path], *names: str | None) -> list[str | None]:
    return [name and str(adapter(name)) for name in names]


def _together(adapter: Callable[[str], Path]) -> dict[str, Any]:
    """The step of :data:`MIX`."""
    return {"do": "generate", "prompts": MIX.prompts, "sampling": SHORT, "lora": _paths(adapter, *MIX.adapters)}


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


@pytest.mark.engine
class TestAdapters(Adapters):
    RUNS = RUNS
    OPERATORS = ("kv_cache_write", "paged_attention")

    def known(self) -> Sequence[str]:
        return ["one", "two", "head"]

    def more(self, adapter: Callable[[str], Path]) -> Sequence[Pass | Call]:
        """A prefix of one adapter asked with others, and scores of prompts, together and one by one."""
        shared = PROMPTS[2]
        return [
            Call("reset_prefix_cache"),
            Pass([shared], adapters=["one"]),
            Pass([shared] * 2, adapters=["one", "two"]),
            Pass([shared]),
            Call("generate", {"prompts": [*SCORED_PROMPTS], "sampling": SCORED, "lora": _paths(adapter, *SCORED_WITH)}),
            *(
                Call("generate", {"prompts": [prompt], "sampling": SCORED, "lora": _paths(adapter, name)})
                for prompt, name in zip(SCORED_PROMPTS, SCORED_WITH, strict=True)
            ),
        ]

    def operators(self, report: Mapping[str, Any]) -> Sequence[str]:
        if report["compiled"] is not None:
            assert report["compiled"]["graphs"] + report["compiled"]["loaded"] >= 1
            return self.OPERATORS
        return (*self.OPERATORS, "rms_norm", "silu_and_mul", "rotary_embedding", "lora_shrink", "lora_expand")

    def test_each_run_is_what_its_name_says(self, run: Run, served: Callable[[Run], Served]) -> None:
        (report,) = served(run).reports
        assert (report["model_runner"], report["compiled"] is None) == (run.name[:2], "eager" in run.name)

    def test_a_prefix_is_shared_within_an_adapter_only(self, run: Run, served: Callable[[Run], Served]) -> None:
        first, both, plain = (answer.cached for answer in served(run).answers[3:6])
        assert first[0] == 0
        assert [cached > 0 for cached in both] == [True, False]
        assert plain[0] == 0

    def test_prompt_logprobs_are_those_of_each_requests_own_adapter(
        self,
        run: Run,
        served: Callable[[Run], Served],
        checkpoint: Callable[[str], Path],
        adapter: Callable[[str], Path],
        tmp_path: Path,
    ) -> None:
        together, *others = (answer.returned for answer in served(run).answers[6:])
        alone = [output for (output,) in others]
        assert len(together) == len(alone) == 6
        for one, single in zip(together, alone, strict=True):
            assert one["tokens"] == single["tokens"]
            for found, wanted in zip(one["prompt_logprobs"][1:], single["prompt_logprobs"][1:], strict=True):
                assert found == pytest.approx(wanted, abs=1e-4)
        merged = variants.merged(checkpoint("qwen3"), adapter("head"), tmp_path / "merged")
        scores = AutoModelForCausalLM.from_pretrained(merged)(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1)
        for place, found in enumerate(together[0]["prompt_logprobs"][1:]):
            right = {token: scores[place, int(token)].item() for token in found}
            assert found == pytest.approx(right, rel=1e-4, abs=1e-3)


@pytest.fixture(scope="module")
def swapped(checkpoint: Callable[[str], Path], adapter: Callable[[str], Path]) -> dict[str, Any]:
    """A compiled engine with room for one adapter, whose requests have another one each time."""
    asked = [[lora] * len(PROMPTS) for lora in _paths(adapter, "one", "two", None, "one")]
    steps = [{"do": "generate", "prompts": PROMPTS, "sampling": SHORT, "lora": lora} for lora in asked]
    engine = {**LORA, **COMPILED, "max_loras": 1}
    (found,) = start_features((checkpoint("qwen3"), [*steps, _together(adapter)], engine)).result()["runs"]
    return found


def test_adapters_change_places_after_compilation(swapped: dict[str, Any], adapted: Wanted) -> None:
    *alone, together = map(_tokens, swapped["steps"])
    assert alone == [adapted(name) for name in ("one", "two", None, "one")]
    assert together == mixed(adapted)
    assert swapped["report"]["compiled"]["graphs"] == 1


@pytest.mark.parametrize("operator", drawn(("lora_shrink", "lora_expand"), 1, "wrong products of adapters"))
def test_a_wrong_product_is_in_the_graph(
    operator: str,
    checkpoint: Callable[[str], Path],
    adapter: Callable[[str], Path],
    adapted: Wanted,
) -> None:
    lora = _paths(adapter, "one") * len(PROMPTS)
    steps = [
        {"do": "generate", "prompts": PROMPTS, "sampling": SHORT},
        {"do": "generate", "prompts": PROMPTS, "sampling": SHORT, "lora": lora},
    ]
    job = checkpoint("qwen3"), steps, {**LORA, **PIECES}
    (found,) = start_features(job, **WRONG, VLLM_FL_PER_OP=f"{operator}=vendor:wrong").result()["runs"]
    base, wrong = map(_tokens, found["steps"])
    assert base == adapted(None)
    assert wrong not in (base, adapted("one"))


def test_our_kernels_serve_adapters_in_tritons_interpreter(
    checkpoint: Callable[[str], Path],
    adapter: Callable[[str], Path],
    adapted: Wanted,
) -> None:
    pytest.importorskip("triton")
    one, two = _paths(adapter, "one", "two")
    few = {"do": "generate", "prompts": PROMPTS[:2] * 3, "sampling": {"max_tokens": 4}}
    steps = [{**few, "lora": [one, None, two, two, None, one]}]
    kernels = ";".join(f"{operator}=impl:default.triton" for operator in ("lora_shrink", "lora_expand"))
    engine = {**LORA, **PIECES, "max_loras": 2}
    job = checkpoint("qwen3"), steps, engine
    variables = {"TRITON_INTERPRET": "1", "VLLM_FL_PREFER": "reference", "VLLM_FL_PER_OP": kernels}
    (found,) = start_features(job, cold=True, **variables).result()["runs"]
    first, second, base = map(adapted, MIXED)
    wanted = [first[0], base[1], second[0], second[1], base[0], first[1]]
    assert _tokens(found["steps"][0]) == [tokens[:4] for tokens in wanted]
    assert ran(found, "lora_shrink") == ran(found, "lora_expand") == {"default.triton"}


@pytest.mark.parametrize("sharded", drawn((False, True), 1, "adapters on two ranks"))
def test_two_ranks_serve_adapters(
    sharded: bool,
    checkpoint: Callable[[str], Path],
    adapter: Callable[[str], Path],
    adapted: Wanted,
) -> None:
    steps = [_together(adapter), {"do": "rpc", "method": "fl_report", "args": []}]
    engine = {**LORA, **COMPILED, "max_loras": 2, "tensor_parallel_size": 2, "fully_sharded_loras": sharded}
    (found,) = start_features((checkpoint("qwen3"), steps, engine)).result()["runs"]
    tokens, reports = _tokens(found["steps"][0]), found["steps"][1]
    assert tokens == mixed(adapted)
    assert [report["rank"] for report in reports] == [0, 1]
    assert all(report["compiled"]["graphs"] == 1 and report["failed"] == {} for report in reports)


@pytest.mark.parametrize("way", DRAFTED)
def test_drafts_change_no_token_of_an_adapter(
    way: str, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    method, how = DRAFTS[way]
    folder = tmp_path_factory.mktemp("drafts")
    target, drafter = drafters.pairs(checkpoint, folder)["draft_model" if method == "ngram" else method]
    one = variants.adapter(target, folder / "one", 1)
    head = variants.adapter(target, folder / "head", 3, adapted=(*variants.ADAPTED, "lm_head"))
    speculation = (
        LOOK_UP if method == "ngram" else {"method": method, "model": str(drafter), "num_speculative_tokens": 3}
    )
    lora = [str(head), None, str(one)]
    generate = {"do": "generate", "prompts": drafters.TURNS * 2, "sampling": {"max_tokens": 48}, "lora": lora * 2}
    scored = {"do": "generate", "prompts": PROMPTS[:3], "sampling": SCORED, "lora": lora}
    steps = [generate, {"do": "metrics", "contains": "spec_decode"}, scored]
    engine = {**LORA, **how, "max_loras": 2}
    runs = (target, steps, {**engine, "speculative_config": speculation}), (target, steps, engine)
    drafted, plain = start_features(*runs, **RUNNERS["V2"]).result()["runs"]
    assert drafted["report"]["model_runner"] == "V2"
    assert _tokens(drafted["steps"][0]) == _tokens(plain["steps"][0])
    assert len({tuple(tokens) for tokens in _tokens(plain["steps"][0])[:3]}) == 3
    accepted, made = (drafted["steps"][1][f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 0 < accepted < made
    for found, wanted in zip(drafted["steps"][2], plain["steps"][2], strict=True):
        assert found["tokens"] == wanted["tokens"]
        for one, other in zip(found["prompt_logprobs"][1:], wanted["prompt_logprobs"][1:], strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_adapters_are_there_again_after_sleep(
    checkpoint: Callable[[str], Path],
    adapter: Callable[[str], Path],
    adapted: Wanted,
) -> None:
    generate = _together(adapter)
    steps = [
        generate,
        {"do": "sleep", "level": 1},
        {"do": "wake_up"},
        generate,
        {"do": "sleep", "level": 2},
        {"do": "wake_up", "tags": ["weights"]},
        {"do": "rpc", "method": "reload_weights", "args": []},
        {"do": "wake_up", "tags": ["kv_cache"]},
        generate,
    ]
    job = checkpoint("qwen3"), steps, {**LORA, **COMPILED, "max_loras": 2, "enable_sleep_mode": True}
    (found,) = start_features(job).result()["runs"]
    for place in (0, 3, 8):
        assert _tokens(found["steps"][place]) == mixed(adapted), place


def _update(wrapper: Any, prefill: bool, requests: list[int], tokens: list[int]) -> None:
    """Have a batch of requests and tokens of adapters 1 and 2, and of none (0)."""
    from vllm.lora.layers import LoRAMapping

    mapping = LoRAMapping(index_mapping=tuple(tokens), prompt_mapping=tuple(requests), is_prefill=prefill)
    wrapper.update_metadata(mapping, [1, 2], 2, 100)


def _wrapper(prefill: bool, requests: list[int], tokens: list[int]) -> Any:
    from vllm_fl.layers.lora import PunicaWrapperFL

    wrapper = PunicaWrapperFL(16, 4, "cpu", lora_config=SimpleNamespace(max_loras=2))
    _update(wrapper, prefill, requests, tokens)
    return wrapper


def test_a_smaller_batch_leaves_nothing_of_a_larger_one_behind() -> None:
    wrapper = _wrapper(True, [2, 0, 1], [2, 2, 0, 1, 1, 0])
    memory = [tensor.data_ptr() for tensor in wrapper.tokens.of(16)]
    assert wrapper.tokens.order[:6].tolist() == [3, 4, 0, 1, 2, 5]
    assert wrapper.tokens.starts.tolist() == [0, 2, 4]
    assert wrapper._embeddings_indices[:7].tolist() == [100, 100, 0, 0, 0, 0, 0]
    _update(wrapper, False, [0, 2], [0, 2])
    assert wrapper.tokens.adapters.tolist() == [-1, 1, *[-1] * 14]
    assert wrapper.tokens.order.tolist() == [1, 0, *range(2, 16)]
    assert (wrapper.tokens.starts.tolist(), wrapper.tokens.active.tolist()) == ([0, 0, 1], [1])
    assert wrapper._embeddings_indices.tolist() == [0, 100, *[0] * 14]
    _update(wrapper, False, [0], [0])
    assert (wrapper.tokens.starts.tolist(), wrapper.tokens.active.tolist()) == ([0, 0, 0], [0])
    assert set(wrapper.tokens.adapters.tolist()) == {-1}
    assert not wrapper._embeddings_indices.any()
    assert memory == [tensor.data_ptr() for tensor in wrapper.tokens.of(16)]


def test_compiled_code_reads_the_mapping_of_each_step() -> None:
    from torch._dynamo.testing import CompileCounter

    wrapper, counter = _wrapper(True, [1], [1, 1]), CompileCounter()
    torch.manual_seed(0)
    downs, ups = ([torch.randn(2, 1, *size) for _ in range(4)] for size in ((3, 8), (6, 3)))

    @torch.compile(backend=counter, fullgraph=True)
    def add(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wrapper.add_lora_linear(y, x, tuple(downs), tuple(ups), 1.0, (6, 6, 6, 6))
        return y

    for tokens in ([1, 1], [2, 0], [0, 0, 0], [1, 0, 2]):
        _update(wrapper, True, [1], tokens)
        x, y = torch.randn(len(tokens), 8), torch.zeros(len(tokens), 24)
        for tensor in (x, y):
            torch._dynamo.mark_dynamic(tensor, 0)
        wanted = torch.zeros(len(tokens), 24)
        for row, number in enumerate(tokens):
            if number:
                parts = [up[number - 1, 0] @ down[number - 1, 0] @ x[row] for down, up in zip(downs, ups, strict=True)]
                wanted[row] = torch.cat(parts)
        torch.testing.assert_close(add(y, x), wanted)
    assert counter.frame_count == 1


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
    from vllm_fl.layers.lora import prompt_logits

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


def test_the_logits_of_drafts_get_the_adapter_of_their_request() -> None:
    from vllm_fl.layers.lora import draft_logits

    wrapper = _wrapper(True, [2, 0, 1], [2, 2, 0, 0, 0, 1])
    torch.manual_seed(0)
    x, down, up = torch.randn(6, 8), torch.randn(2, 1, 3, 8), torch.randn(2, 1, 6, 3)
    y = torch.zeros(6, 6)
    with pytest.raises(RuntimeError, match="6 rows of logits, but adapters for 3"):
        wrapper.add_lora_logits(y, x, down, up, 1.0)
    with draft_logits(np.array([2, 3, 1])):
        wrapper.add_lora_logits(y, x, down, up, 1.0)
    products = [
        torch.zeros(6) if slot < 0 else up[slot, 0] @ down[slot, 0] @ row
        for slot, row in zip((1, 1, -1, -1, -1, 0), x, strict=True)
    ]
    torch.testing.assert_close(y, torch.stack(products))
    assert wrapper.requests.host.tolist() == [1, -1, 0]

"""LoRA on a GPU with captured graphs; with drafts the tokens are those without."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from adapters import Adapters, Run, Wanted, alone
from drafters import LONG, TURNS
from drafting import LOOK_UP, NGRAM
from host_engines import OURS, Call, Engine, Host, Pass, Served, ran
from running import MAX_TOKENS, PROMPTS

SIZES = [1, 2, 4, 8, 16]
LONGER = PROMPTS[1]
"""A prompt with more tokens than the largest graph has."""
ENGINE = {
    "enforce_eager": False,
    "gpu_memory_utilization": 0.1,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 128,
    "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": SIZES},
}
HOSTS = "_topk_log_softmax_kernel"
"""vLLM's kernel of log-probabilities, which it compiles for the first request that asks for them."""
LAYERS, PRODUCTS = 3, 4
"""The checkpoint's layers, and the products of each that adapters change."""


@pytest.mark.gpu
class TestAdapters(Adapters):
    RUNS = (
        Run("V2", ENGINE, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
        Run("V1", ENGINE, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    )
    OPERATORS = ("lora_shrink", "lora_expand")
    PLACE = OURS

    def known(self) -> Sequence[str]:
        return ["one", "two", "head"]

    def more(self, adapter: Callable[[str], Path]) -> Sequence[Pass | Call]:
        counting = Call("rpc", {"method": "fl_set_counting", "args": [True]})
        last = Pass([LONGER], adapters=["two"])
        return [alone("head"), Pass(), Call("reset_prefix_cache"), counting, last]

    def test_another_adapter_takes_the_place_of_one_and_changes_the_logits_too(
        self, run: Run, served: Callable[[Run], Served], adapted: Wanted
    ) -> None:
        assert [answer.tokens for answer in served(run).answers[2:4]] == [adapted("head"), adapted(None)]

    def test_our_kernels_are_in_graphs_that_are_replayed(
        self, run: Run, served: Callable[[Run], Served], adapted: Wanted
    ) -> None:
        (report,) = served(run).reports
        assert report["model_runner"] == run.name
        assert served(run).answers[-1].tokens == [adapted("two")[1]]
        assert ran(report)["lora_shrink"] == ran(report)["lora_expand"] == {"default.triton"}
        calls = served(run).counted("lora_shrink", "default.triton")
        # The prompt is longer than a graph, so it makes calls; each of the other steps would make as many.
        assert LAYERS * PRODUCTS <= calls < 3 * LAYERS * PRODUCTS < MAX_TOKENS * LAYERS * PRODUCTS
        assert report["compiled"]["graphs"] + report["compiled"]["loaded"] >= 1

    def test_no_kernel_of_ours_is_compiled_while_it_serves(self, run: Run, served: Callable[[Run], Served]) -> None:
        late = re.findall(r"during inference: (\S+?)\.? ", served(run).log)  # vLLM's monitor of late compilations
        assert set(late) <= {HOSTS}

    def test_drafts_change_no_token_of_an_adapter(
        self, host: Host, checkpoint: Callable[[str], Path], adapter: Callable[[str], Path]
    ) -> None:
        asked = [Pass(TURNS * 2, LONG, adapters=["head", None, "one"] * 2, drafts=True)]
        speculation = {"method": NGRAM, "num_speculative_tokens": 3, **LOOK_UP}
        adapters = {name: adapter(name) for name in self.known()}
        plain = Pass(asked[0].prompts, LONG, adapters=asked[0].adapters)
        engines = (
            Engine(checkpoint("qwen3"), asked, {**ENGINE, "speculative_config": speculation}, adapters),
            Engine(checkpoint("qwen3"), [plain], ENGINE, adapters),
        )
        variables: dict[str, Any] = {**self.PLACE, **self.RUNS[0].variables}
        drafted, right = (one.result() for one in host.serve(*engines, **variables))
        assert (drafted.reports[0]["model_runner"], drafted.reports[0]["failed"]) == ("V2", {})
        assert drafted.answers[0].tokens == right.answers[0].tokens
        assert drafted.answers[0].drafts is not None
        accepted, made = drafted.answers[0].drafts
        assert 0 < accepted < made

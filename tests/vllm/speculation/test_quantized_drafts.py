"""Drafts beside quantized weights under vLLM, with vLLM's ways to draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from drafting import NGRAM, Models
from host_engines import Served
from quantized_checkpoints import SCHEMES
from quantized_drafts import QuantizedDrafts, Run
from quantized_mixture import QuantizedSparse
from sampling import drawn

RUNS = (
    Run("draft_model", "awq", "compressed-tensors W8A16 fp8"),
    Run("draft_model", "", "compressed-tensors W4A16"),
    Run("eagle", "gptq", ""),
    Run("eagle3", "compressed-tensors W8A16 fp8", ""),
    Run("eagle3", "fp8", ""),
    Run("mtp", "awq", "awq", 1),
    Run("mtp", "fp8, blocks of 128", "fp8, blocks of 128", 1),
)
SPARSE = (
    Run("mtp", "fp8, blocks of 128", "fp8, blocks of 128", 2, sparse=True),
    Run("mtp", "fp8, blocks of 128", "fp8, blocks of 128", sparse=True, ranks=2),
    Run("mtp", "awq", "awq", 3, sparse=True),
    Run(NGRAM, "compressed-tensors W4A16", "", sparse=True),
    Run(NGRAM, "compressed-tensors W8A8 int8", "", sparse=True),
)
DRAWN = [*drawn(RUNS, 2, "quantized, who drafts"), *drawn(SPARSE, 1, "quantized and sparse, who drafts")]
NEAR = (RUNS[-1], *SPARSE)
"""Latent attention quantizes inputs in steps of a prompt only; lists have near choices."""


@pytest.mark.engine
class TestDrafts(QuantizedDrafts):
    RUNS = DRAWN
    TOLD = [run for run in DRAWN if run not in NEAR]
    JUDGED = [run for run in DRAWN if run in NEAR]
    ENGINE = {"max_num_seqs": 64, "max_num_batched_tokens": 256}
    LISTING = QuantizedSparse.OPTIONS

    def drafting(self, run: Run, made: Models) -> Mapping[str, Any]:
        return {"speculative_config": run.speculation(made.drafter)}

    def used(self, report: Mapping[str, Any], scheme: str) -> int:
        return int(report["layers"].get(SCHEMES[scheme].layer, 0))

    def test_the_drafter_has_attention_of_ours_too(
        self, run: Run, served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        drafted, plain = (sum(engine.reports[0]["attention"].values()) for engine in served(run))
        assert plain > 0
        assert (drafted > plain) == (run.method != NGRAM)

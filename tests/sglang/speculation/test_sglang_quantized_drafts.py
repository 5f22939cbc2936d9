"""Drafts beside quantized weights under SGLang, with SGLang's ways to draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from drafting import NGRAM, Models
from quantized_checkpoints import SCHEMES, Scheme
from quantized_drafts import QuantizedDrafts, Run
from sampling import drawn
from variants import said

ALGORITHMS = {"draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", NGRAM: "NGRAM"}
RUNS = (
    Run("draft_model", "awq", "compressed-tensors W4A16"),
    Run("draft_model", "", "gptq"),
    Run("eagle", "compressed-tensors W8A16 fp8", ""),
    Run("eagle3", "fp8", ""),
)
BLOCKS = "fp8, blocks of 128"
OTHERS = ("awq", "compressed-tensors W4A16", "compressed-tensors W8A8 int8", "compressed-tensors W8A8 fp8")
LISTING = (
    Run("mtp", BLOCKS, BLOCKS, 2, sparse=True),
    Run("mtp", "awq", "awq", 2, sparse=True),
    *(Run(NGRAM, scheme, "", sparse=True) for scheme in (BLOCKS, *OTHERS)),
)
DRAWN = drawn(RUNS, 1, "quantized, who drafts under SGLang")
LISTED = drawn(LISTING, 1, "quantized and sparse, who drafts under SGLang")


@pytest.mark.engine
class TestDrafts(QuantizedDrafts):
    RUNS = [*DRAWN, *LISTED]
    TOLD = DRAWN
    JUDGED = LISTED
    ABSORBED = True
    RANKS = "tp_size"
    SAMPLES = 800
    ENGINE = {"max_running_requests": 64, "max_total_tokens": 8192, "random_seed": 3}

    def models(self, run: Run, folder: Path) -> Models:
        """Have a head say what SGLang reads."""
        made = super().models(run, folder)
        if made.drafter is None:
            return made
        if run.method == "eagle":
            size = json.loads((made.plain / "config.json").read_text())["hidden_size"]
            said(made.drafter, {"fc.bias": torch.zeros(size)}, architectures=["LlamaForCausalLMEagle"])
        elif run.method == "eagle3":
            said(made.drafter, {}, draft_vocab_size=None)
        return made

    def drafting(self, run: Run, made: Models) -> Mapping[str, Any]:
        algorithm = {"speculative_algorithm": ALGORITHMS[run.method]}
        if made.drafter is None:
            return {**algorithm, "speculative_num_draft_tokens": run.tokens + 1}
        return {
            **algorithm,
            "speculative_draft_model_path": str(made.drafter),
            **({"speculative_num_steps": run.tokens} if run.sparse else {}),
            **({} if run.drafter or not run.target else {"speculative_draft_model_quantization": "unquant"}),
        }

    def written(self, run: Run, scheme: str) -> Scheme:
        """Return the scheme itself, because SGLang serves an indexer's keys quantized like the others."""
        return SCHEMES[scheme]

    def used(self, report: Mapping[str, Any], scheme: str) -> int:
        calls = (count for name, count in report["counts"].items() if name.split()[0] == SCHEMES[scheme].operators[-1])
        return sum(calls)

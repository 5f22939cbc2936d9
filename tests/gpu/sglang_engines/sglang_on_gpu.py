"""The common parts of files with SGLang's engines on a GPU; without a GPU, or SGLang, they are skipped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("sglang")

from serving import STEP, answered, every_score, python, start

from running import PROMPTS

__all__ = [
    "NEUTRAL",
    "OURS",
    "REFERENCES",
    "STEP",
    "TREES",
    "all_is_ours",
    "answered",
    "every_score",
    "python",
    "replayed",
    "start",
    "texts",
]

TREE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
TREES = {TREE: os.environ.get(TREE, "python")}
"""SGLang's radix tree in Rust fails beside PyTorch 2.11; an engine's environment has no other variable of SGLang's."""
NEUTRAL = {**TREES, "SGLANG_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
REFERENCES = {**TREES, "SGLANG_FL_PREFER": "reference"}
OURS = {"default.triton"}


def all_is_ours(report: dict[str, Any], fused: Sequence[str] = ()) -> bool:
    """Whether a rank ran no layer of SGLang's own in the place of one of ours, and no implementation failed.

    Args:
        report: what the rank's plugin says.
        fused: operators that SGLang computes within a kernel of its own.
    """
    others = any(report[name] for name in ("failed", "native_layers", "fallen_through"))
    return not others and report["undispatched"].keys() == {*fused}


def texts(step: dict[str, Any]) -> list[list[int]]:
    """The prompts with what a step answered."""
    return [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, step["tokens"], strict=True)]


def replayed(report: dict[str, Any], steps: int) -> bool:
    """Whether graphs of small batches were captured, and at least so many steps replayed one."""
    return {1, 2, 4} <= set(report["graphs"]["requests"]) and report["graphs"]["replays"] >= steps

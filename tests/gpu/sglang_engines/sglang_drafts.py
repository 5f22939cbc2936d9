"""The rules for engines on a GPU that draft: those of the engines on a CPU (``test_sglang_speculation.py``).

A test file names its methods, and imports the fixtures and :class:`Rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_on_gpu import NEUTRAL, OURS, all_is_ours, start
from test_sglang_speculation import (
    STEPS,
    engine,
    models,
    test_drafts_are_accepted_and_rejected,
    test_greedy_tokens_equal_hugging_face_in_chunks_and_from_the_radix_cache,
    test_long_answers_equal_hugging_face,
    test_sampled_tokens_keep_the_targets_distribution,
)

from running import ran

__all__ = ["Rules", "models", "results"]
Models = dict[str, tuple[Path, Path | None]]
Result = Callable[[str], dict[str, Any]]


def results(methods: Sequence[str], models: Models) -> Result:
    """Start an engine for each method; a method → what its engine gave."""
    runs = {}
    for method in methods:
        target, drafter = models[method]
        runs[method] = start(target, *STEPS, variables=NEUTRAL, engine=engine(method, drafter))
    return lambda method: runs[method].result()


class Rules:
    """Subclasses have ``method`` parametrized, and their files a fixture ``result``."""

    def test_greedy_tokens_equal_hugging_face(
        self, method: str, result: Result, expected: Callable[[str], list[list[int]]]
    ) -> None:
        test_greedy_tokens_equal_hugging_face_in_chunks_and_from_the_radix_cache(method, result, expected)

    def test_long_answers_equal_hugging_face(self, method: str, result: Result, models: Models) -> None:
        test_long_answers_equal_hugging_face(method, result, models)

    def test_drafts_are_accepted_and_rejected(self, method: str, result: Result) -> None:
        test_drafts_are_accepted_and_rejected(method, result)

    def test_sampled_tokens_keep_the_targets_distribution(self, method: str, result: Result, models: Models) -> None:
        test_sampled_tokens_keep_the_targets_distribution(method, result, models)

    def test_our_kernels_ran_and_the_log_says_that_drafts_are_eager(self, method: str, result: Result) -> None:
        found = result(method)
        report, drafter = found["report"], found["report"]["drafter"]
        assert all_is_ours(report)
        assert drafter is None or drafter["native_layers"] == drafter["undispatched"] == {}
        assert ran(found, "paged_attention") | ran(found, "mla_decode") == OURS
        assert report["graphs"] is None
        assert "because sglang_fl makes and checks drafts eagerly" in found["log"]

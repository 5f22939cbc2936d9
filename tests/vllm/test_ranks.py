"""Two tensor-parallel ranks over gloo: they run the same implementations, or they refuse to serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import start

TWO = {"tensor_parallel_size": 2}


def test_two_ranks_give_the_same_tokens_through_the_same_implementations(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    result = start(checkpoint("llama"), engine=TWO).result()
    assert result["steps"][0]["tokens"] == expected("llama")
    first, second = result["reports"]
    assert first["pid"] != second["pid"]
    assert first["counts"] == second["counts"]
    assert {key.split(" ")[1] for key in first["counts"]} == {"reference.torch"}


def test_ranks_that_chose_differently_refuse_to_serve(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(AssertionError, match="the ranks chose different implementations") as caught:
        start(checkpoint("llama"), engine=TWO, variables={"VLLM_FL_PLUGIN_MODULES": "divergent_plugin"}).result()
    assert "silu_and_mul failed: [None, ['vendor.divergent']]" in str(caught.value)

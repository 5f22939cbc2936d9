"""Exchanges between the ranks of one group, and whether they chose alike: two processes, over gloo and a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from collect_ranks import SHAPE, SIZES, tensor_of

import two_ranks

LIBRARIES = ("TorchCollectives", "FlagCXCollectives")
RANKS = range(two_ranks.RANKS)


@pytest.fixture(scope="module")
def results(standin: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Library → what each of two ranks got."""
    libraries = dict(zip(LIBRARIES, ("", standin()), strict=True))
    return two_ranks.run(Path(__file__).parent / "collect_ranks.py", tmp_path_factory.mktemp("ranks"), libraries)


@pytest.mark.parametrize("library", LIBRARIES)
def test_parts_of_any_size_are_joined_along_any_dimension(library: str, results: dict[str, list[Any]]) -> None:
    for rank in RANKS:
        gathers = results[library][rank]["gathers"]
        assert len(gathers) == 4 * len(SIZES)
        for case in gathers:
            dim, sizes = case["dim"], case["sizes"] or [4, 4]
            parts = [tensor_of(other).narrow(dim, 0, size) for other, size in zip(RANKS, sizes, strict=True)]
            assert case["results"] == [torch.cat(parts, dim).tolist()] * 3, case


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_sum_is_divided_into_parts_of_any_size_along_any_dimension(
    library: str, results: dict[str, list[Any]]
) -> None:
    whole = tensor_of(0) + tensor_of(1)
    for rank in RANKS:
        scatters = results[library][rank]["scatters"]
        assert len(scatters) == 4 * len(SIZES)
        for case in scatters:
            dim = case["dim"]
            sizes = case["sizes"] or [whole.shape[dim] // 2] * 2
            assert case["results"] == [whole.split(sizes, dim)[rank].tolist()] * 3, case


@pytest.mark.parametrize("library", LIBRARIES)
def test_strided_tensors_are_summed_sent_and_overwritten_in_place(library: str, results: dict[str, list[Any]]) -> None:
    first, second = results[library]
    for got in (first, second):
        assert got["sum"] == (tensor_of(0) + tensor_of(1)).transpose(0, 2).tolist()
        assert got["broadcast"] == tensor_of(1)[:, ::2].tolist()
    assert second["received"] == tensor_of(0).transpose(0, 1).reshape(SHAPE).tolist()


@pytest.mark.parametrize("library", LIBRARIES)
def test_sizes_and_outputs_that_do_not_fit_are_refused_before_anything_is_sent(
    library: str, results: dict[str, list[Any]]
) -> None:
    assert results[library][0]["refusals"] == [
        "3 rows cannot be divided equally among 2 ranks",
        "3 rows cannot be divided into [1, 1] for 2 ranks",
        "3 rows cannot be divided into [3] for 2 ranks",
        "rank 0 of 2 has 3 rows, not those of [2, 2]",
        "the result has the shape [6, 2], but the output has [3, 2]",
    ]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_named_library_runs_and_each_call_is_counted(library: str, results: dict[str, list[Any]]) -> None:
    first, second = results[library]
    assert first["library"] == second["library"] == library
    each = 3 * 4 * len(SIZES)  # into nothing, a contiguous and a strided output
    counts = {"broadcast": 1, "all_reduce": 1, "all_gather": each + 2, "reduce_scatter": each + 3}
    assert first["calls"] == {"all": {**counts, "send": 1}}
    assert second["calls"] == {"all": {**counts, "recv": 1}}


@pytest.mark.parametrize("library", LIBRARIES)
def test_ranks_that_chose_alike_hear_nothing_and_those_that_did_not_hear_what_differs(
    library: str, results: dict[str, list[Any]]
) -> None:
    chosen = "silu_and_mul: [[['reference.torch']], [['vendor.uneven', 'reference.torch']]] on ranks [0, 1]"
    for rank in RANKS:
        got = results[library][rank]
        assert got["alike"] == {}
        assert got["different"].keys() == {"choices", "manifests"}
        assert chosen in got["different"]["choices"]
        assert "vendor.uneven" in got["different"]["manifests"]
        assert f"(there: rank {1 - rank})" in got["different"]["manifests"]
        assert "rank 0: /there/chip.yaml (0123456789abcdef); rank 1: none;" in got["lacking"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_something_holds_everywhere_only_if_it_does_on_every_rank(library: str, results: dict[str, list[Any]]) -> None:
    for rank in RANKS:
        assert results[library][rank]["everywhere"] == [True, False, False, False]

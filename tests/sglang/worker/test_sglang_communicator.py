"""SGLang's groups with our hooks give what they give without, over gloo and over a stand-in for FlagCX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from coordinate import IN_ONE_ORDER, UNHOOKED
from serving import python

import two_ranks

OURS = ("TorchCollectives", "FlagCXCollectives")
RANKS = range(two_ranks.RANKS)
UNABLE = {  # what SGLang raises on a CPU
    **dict.fromkeys(
        ("all_gather_into_tensor", "reduce_scatter_tensor", "reduce_scatter_along_dim"), "NotImplementedError"
    ),
    **dict.fromkeys(("reduce_scatterv", "reduce_scatterv_into"), "AttributeError"),
    **dict.fromkeys(
        ("all_gatherv", "all_gatherv_empty", "all_gatherv_equal", "all_gatherv_into", "all_gatherv_list"),
        "AttributeError",
    ),
}


@pytest.fixture(scope="module")
def results(standin: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """SGLang's own, or the name of our library → what each of two ranks got."""
    libraries = dict(zip((UNHOOKED, *OURS), ("", "", standin()), strict=True))
    return two_ranks.run(Path(__file__).with_name("coordinate.py"), tmp_path_factory.mktemp("ranks"), libraries)


@pytest.mark.parametrize("library", OURS)
def test_whatever_sglang_can_do_without_us_gives_the_same_with_us(library: str, results: dict[str, list[Any]]) -> None:
    for rank in RANKS:
        own, hooked = results[UNHOOKED][rank]["results"], results[library][rank]["results"]
        assert own.keys() == hooked.keys()
        assert {call: own[call] for call in UNABLE} == UNABLE
        able = own.keys() - UNABLE.keys()
        assert len(able) == 10
        for call in able:
            assert hooked[call] == own[call], call


@pytest.mark.parametrize("library", OURS)
def test_what_sglang_cannot_do_on_a_cpu_works_with_us(library: str, results: dict[str, list[Any]]) -> None:
    joined = torch.cat([torch.arange(6.0).reshape(2, 3) + 10 * rank for rank in RANKS])
    parts = torch.cat([torch.full((1 + 2 * rank, 2), float(rank + 1)) for rank in RANKS])
    whole = 3 * torch.arange(8.0).reshape(4, 2)
    for rank in RANKS:
        uneven = whole.split([1, 3])[rank].tolist()
        expected = {
            "all_gather_into_tensor": joined.tolist(),
            "all_gatherv": [parts.tolist()],
            "all_gatherv_empty": [parts[1:3].tolist()],
            "all_gatherv_equal": [joined.tolist()],
            "all_gatherv_into": [parts.tolist()],
            "all_gatherv_list": [parts.tolist(), (2 * parts).tolist()],
            "reduce_scatter_tensor": whole.split(2)[rank].tolist(),
            "reduce_scatter_along_dim": whole.split(1, 1)[rank].tolist(),
            "reduce_scatterv": uneven,
            "reduce_scatterv_into": uneven,
        }
        hooked = results[library][rank]["results"]
        assert {call: hooked[call] for call in UNABLE} == expected


@pytest.mark.parametrize("library", OURS)
def test_sums_in_one_order_are_made_of_all_reduce(library: str, results: dict[str, list[Any]]) -> None:
    for rank in RANKS:
        own, ours = results[UNHOOKED][rank]["one_order"], results[library][rank]
        assert ours["one_order"] == own == {call: ours["results"][call] for call in IN_ONE_ORDER}
        before, after = ours["calls"]["tp:0"], ours["calls_after"]["tp:0"]
        assert after == {**before, "all_reduce": before["all_reduce"] + len(IN_ONE_ORDER)}


@pytest.mark.parametrize("library", OURS)
def test_the_named_library_ran_and_every_call_of_several_ranks_is_counted(
    library: str, results: dict[str, list[Any]]
) -> None:
    assert all(results[UNHOOKED][rank]["calls"] == {} for rank in RANKS)
    counts = {"all_reduce": 3, "all_gather": 11, "reduce_scatter": 5, "broadcast": 1}
    for rank, single in zip(RANKS, ("send", "recv"), strict=True):
        assert results[library][rank]["library"] == library
        assert results[library][rank]["calls"] == {"world:0": {}, "tp:0": {**counts, single: 1}}


def test_a_library_that_cannot_be_used_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}')
    start = f"import sglang; sglang.Engine(model_path={str(model)!r}, skip_tokenizer_init=True, tp_size=2)"
    ended = python("-c", start, FLAGCX_PATH=str(tmp_path / "nowhere"))
    assert ended.returncode != 0
    assert "environment variable FLAGCX_PATH" in ended.log
    assert "there is no such file; name a libflagcx.so" in ended.log
    assert "Init parallel begin" not in ended.log

"""Each PyTorch form of a kernel of the V2 runner does what the Triton kernel does, in Triton's interpreter.

vLLM's functions launch both on the same random inputs (``run_runner_kernels.py``). Two kernels the interpreter cannot
run: those are compared with loops.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import HERE, environment

import processes
from vllm_fl.runner_kernels import launch, logits, native, states, table

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

LOOPS = {"gpu.structured_outputs._apply_grammar_bitmask_kernel", "gpu.metrics.logits._num_nans_kernel"}
SEEDS = 3


NATIVE = {name for name, form in table.FORMS.items() if form in native.NATIVE}
CASES = ["tables", "positions_and_lengths", "sampled_and_drafted", "sampled_and_rejected", "update", "chosen", "greedy"]
"""Those that launch what has a function in C++."""


def launched(name: str) -> Callable[..., None]:
    """A form as vLLM launches it: with the arguments of its kernel."""
    return native.launched(table.FORMS[name], table.names_of(name))


def compare(**job: Any) -> dict[str, Any]:
    return processes.finish(HERE / "run_runner_kernels.py", {"seeds": SEEDS, **job}, environment(), True)


@pytest.fixture(scope="module")
def forms() -> dict[str, Any]:
    return compare(native=False)


@pytest.fixture(scope="module")
def functions() -> dict[str, Any]:
    return compare(native=True, cases=CASES)


def test_every_form_gives_what_its_kernel_gives(forms: dict[str, Any]) -> None:
    assert {name: why for name, why in forms["differing"].items() if why} == {}


def test_every_form_ran(forms: dict[str, Any]) -> None:
    assert set(forms["ran"]) == set(table.FORMS) - LOOPS
    assert forms["native"] == {}


def test_on_a_device_blocks_of_attention_are_cleared_as_tensors() -> None:
    class Zeroer:
        def __init__(self, device: torch.device, groups: Any, sizes: list[int], layers: Any, num_blocks: int) -> None:
            self.groups = list(groups)

        zero_block_ids: Any = None

    for _ in range(2):
        states.clear_as_tensors(Zeroer)
    cache = torch.ones(6, 2, 4, 8).transpose(1, 2)  # a block of vLLM's is two of the kernels'
    layers = {"attention": SimpleNamespace(kv_cache=cache), "mamba": SimpleNamespace(kv_cache=(torch.ones(3),))}
    zeroer = Zeroer(cache.device, iter([SimpleNamespace(layer_names=list(layers))]), [4], layers, 3)
    zeroer.zero_block_ids([])
    zeroer.zero_block_ids([1])
    assert cache.flatten(1).mean(1).tolist() == [1, 1, 0, 0, 1, 1]
    assert len(zeroer.groups) == 1


def test_every_function_gives_what_its_kernel_gives(functions: dict[str, Any]) -> None:
    assert functions["differing"] == dict.fromkeys(CASES, "")


def test_every_function_ran(functions: dict[str, Any]) -> None:
    did = {name for name, answers in functions["native"].items() if True in answers}
    assert did == {name.rpartition("._")[2].removesuffix("_kernel") for name in NATIVE}
    assert functions["native"]["gumbel_sample"] == [False, True], "temperatures are the form's"


def test_a_row_or_a_token_outside_of_its_table_is_an_error() -> None:
    lengths, starts, computed = (torch.zeros(4).int() for _ in range(3))
    update = launched("gpu.input_batch._prepare_pos_seq_lens_kernel")
    positions = torch.zeros(8).long()
    for state, end in ((4, 1), (-1, 1), (0, 9)):
        starts[1:] = end
        with pytest.raises(IndexError, match="prepare_pos_seq_lens: a request's row or a token lies outside"):
            update(positions, lengths, torch.tensor([state]), starts, computed, 4)
    assert not positions.any()
    starts[1:] = 2
    update(positions, lengths, torch.tensor([3]), starts, computed + 5, 4)
    assert (positions[:3].tolist(), lengths.tolist()) == ([5, 6, 0], [7, 0, 0, 0])


def test_what_is_no_number_is_never_chosen() -> None:
    choose = launched("gpu.sample.gumbel._gumbel_sample_kernel")
    logits = torch.full((2, 40), float("nan"))
    logits[0, [3, 20, 37]] = torch.tensor([-2.0, -1.0, float("-inf")])
    tokens, largest = torch.zeros(2, 2).long(), torch.zeros(2, 2)
    nothing = torch.zeros(2)
    rest = (None, 0, 0, None, None, 0, logits, 40, torch.arange(2), nothing.long(), nothing.long(), nothing, 40)
    choose(tokens, 2, largest, 2, *rest, BLOCK_SIZE=32, IS_DRAFTING=False, APPLY_TEMPERATURE=False, USE_FP64=False)
    assert tokens.tolist() == [[20, 37], [0, 32]]
    assert largest.tolist() == [[-1.0, float("-inf")], [float("-inf")] * 2]


def test_without_a_compiler_the_forms_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compiles", lambda: False)
    monkeypatch.setattr(native, "_run", None)
    lengths, starts, computed = (torch.arange(4).int() for _ in range(3))
    positions = torch.zeros(3).long()
    launched("gpu.input_batch._prepare_pos_seq_lens_kernel")(positions, lengths, torch.tensor([2]), starts, computed, 4)
    assert (positions.tolist(), lengths.tolist()) == ([2, 0, 0], [3, 0, 0, 0])


def test_a_form_gets_what_it_names_of_its_kernels_arguments() -> None:
    def form(second: int, size: int, later: int = 7) -> tuple[int, int, int]:
        return second, size, later

    run = launch.launched(form, ["first", "second", "size"])
    assert run(1, 2, size=3) == (2, 3, 7)
    assert launch.launched(form, ["later", "second", "size"])(1, 2, 3) == (2, 3, 1)


def test_a_form_whose_argument_this_vllm_does_not_have_is_an_error() -> None:
    with pytest.raises(TypeError, match="num_nans: the kernel of this vLLM has no vocab_size"):
        launch.launched(logits.num_nans, ["logits", "logits_stride", "num_nans", "size"])


def test_a_grammar_rules_tokens_out_by_request_and_place() -> None:
    generator, size, stride = torch.Generator().manual_seed(0), 70, 3
    values = torch.randn(6, size, generator=generator)
    places, cu_num_logits = [(0, 0), (2, 0), (2, 1), (2, 2)], [0, 1, 4, 6]
    mask = torch.randint(-(1 << 31), 1 << 31, (4, 3), generator=generator).int()
    expected = values.clone()
    for number, (request, place) in enumerate(places):
        row = cu_num_logits[request] + place
        for token in range(size if row < cu_num_logits[request + 1] else 0):
            if not int(mask[number, token // 32]) >> token % 32 & 1:
                expected[row, token] = float("-inf")
    rows = torch.tensor([request * stride + place for request, place in places]).int()
    starts = torch.tensor(cu_num_logits).int()
    launched("gpu.structured_outputs._apply_grammar_bitmask_kernel")(
        values, size, rows, starts, mask, 3, size, MASK_STRIDE=stride
    )
    assert torch.equal(values, expected)


def test_what_is_not_a_number_is_counted() -> None:
    values, found = torch.zeros(3, 5), torch.full((3,), -1).int()
    values[1, 2] = values[1, 4] = float("nan")
    values[2, 0] = float("inf")
    launched("gpu.metrics.logits._num_nans_kernel")(values, 5, found, 5)
    assert found.tolist() == [0, 2, 0]

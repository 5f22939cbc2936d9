"""Which form of a quantized product runs; plans of tiles for experts, and candidates, in Triton's interpreter.

That products are right: test_triton.py, and tests/gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from fl_dispatch.backends.triton.impl import moe, quantized_moe, scaled, weight_only

FP8 = torch.float8_e4m3fn
HALF, SINGLE = torch.float16, torch.float32


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that would run."""
    names: list[str] = []
    for module, kernels in ((scaled, ("row", "rows", "tiles")), (weight_only, ("row", "rows", "dequantize"))):
        for name in kernels:
            monkeypatch.setattr(module, f"_launch_{name}", lambda *args, name=name, **options: names.append(name))
    return names


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [(0, []), (1, ["row"]), (2, ["rows"]), (scaled.SOME_ROWS, ["rows"]), (scaled.SOME_ROWS + 1, ["tiles"])],
)
def test_rows_decide_the_form_of_a_product_of_two_quantized_sides(
    rows: int, kernels: list[str], launched: list[str]
) -> None:
    x, weight = torch.zeros(rows, 64, dtype=FP8), torch.zeros(48, 64, dtype=FP8)
    found = scaled.scaled_linear(x, torch.ones(rows, 1), weight, torch.ones(48, 1))
    assert launched == kernels
    assert (found.shape, found.dtype) == ((rows, 48), torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "columns", "blocks", "tile"),
    [
        (4096, 4096, 0, scaled.TILES[0]),
        (256, 6144, 0, scaled.TILES[1]),
        (256, 4096, 128, scaled.TILES[2]),
        (65, 64, 0, scaled.TILES[-1]),
        (7, 28672, 0, (16, *scaled.WIDE)),
        (7, 28672, 128, (16, *scaled.MIDDLE)),
        (64, 14336, 0, (64, *scaled.MIDDLE)),
        (64, 6144, 0, (64, *scaled.MIDDLE)),
        (33, 4096, 0, (64, *scaled.NARROW)),
    ],
)
def test_a_tile_leaves_no_processor_idle_where_that_can_be(
    rows: int, columns: int, blocks: int, tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled, "processors", lambda device: 132)
    monkeypatch.setattr(scaled, "shared_memory", lambda device: 227 << 10)
    assert scaled._tile(rows, columns, torch.device("meta"), blocks) == tile


def test_wide_tiles_are_for_chips_with_room_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "processors", lambda device: 108)
    monkeypatch.setattr(scaled, "shared_memory", lambda device: 163 << 10)
    assert scaled._tile(64, 28672, torch.device("meta")) == (64, *scaled.MIDDLE)


@pytest.mark.parametrize(
    ("rows", "group", "dtype", "kernels"),
    [
        (0, 64, HALF, []),
        (1, 64, HALF, ["row"]),
        (1, 24, SINGLE, ["row"]),
        (2, 64, HALF, ["rows"]),
        (2, 64, SINGLE, ["dequantize"]),
        (2, 16, HALF, ["dequantize"]),
        (weight_only.SOME_ROWS, 64, HALF, ["rows"]),
        (4 * weight_only.SOME_ROWS + 1, 64, HALF, ["dequantize"]),
    ],
)
def test_rows_groups_and_types_decide_how_few_bits_are_multiplied(
    rows: int, group: int, dtype: torch.dtype, kernels: list[str], launched: list[str]
) -> None:
    inner = 2 * group
    weight, scale = torch.zeros(40, inner // 2, dtype=torch.uint8), torch.ones(40, 2, dtype=dtype)
    found = weight_only.weight_only_linear(torch.zeros(rows, inner, dtype=dtype), weight, scale)
    assert launched == kernels
    assert (found.shape, found.dtype) == ((rows, 40), dtype)


# -- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plans",
    [
        moe.PLANS,
        quantized_moe.SCALED_PLANS,
        quantized_moe.BLOCK_PLANS,
        quantized_moe.PACKED_PLANS,
    ],
)
def test_pairs_of_an_expert_decide_the_tiles(plans: moe.Plans) -> None:
    assert plans.choose(1, 8, 128) is plans.choose(64, 8, 128) is plans.few[0][1]
    assert plans.choose(129, 8, 128) is plans.choose(256, 8, 128) is plans.few[1][1]
    assert plans.choose(512, 8, 128) is plans.few[2][1]
    assert plans.choose(513, 8, 128) is plans.choose(16384, 8, 128) is plans.many


@pytest.mark.parametrize(("tokens", "sorts"), [(1, False), (2, False), (3, True)])
def test_few_pairs_are_not_sorted(tokens: int, sorts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_pairs = torch.zeros(48, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.zeros(1)
    monkeypatch.setattr(moe, "moe_align_block_size", lambda *args: sorted_pairs)
    order = moe.arrange(torch.zeros(tokens, 2, dtype=torch.int32), None, 16, 16)
    assert order.options == (sorts, False, 16)
    assert (order.blocks, order.places) == ((3, 48) if sorts else (2 * tokens, 2 * tokens))


def experts_of(kind: torch.dtype, tokens: int = 2, hidden: int = 64, inner: int = 32) -> dict[str, Any]:
    """Arguments of ``scaled_moe`` for two experts."""
    return {
        "hidden_states": torch.zeros(tokens, hidden),
        "w13": torch.zeros(2, 2 * inner, hidden, dtype=kind),
        "w13_scale": torch.ones(2, 2 * inner, 1),
        "w2": torch.zeros(2, hidden, inner, dtype=kind),
        "w2_scale": torch.ones(2, hidden, 1),
        "topk_weights": torch.ones(tokens, 1),
        "topk_ids": torch.zeros(tokens, 1, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, True),
        ({"activation": "swiglu"}, "activation 'swiglu'"),
        ({"hidden_states": torch.zeros(2, 64, dtype=torch.float64)}, "float64"),
        ({"w2": torch.zeros(2, 64, 32, dtype=FP8)}, "weights of int8 or float8_e4m3fn, both of one type"),
        ({"w2": torch.zeros(2, 32, 64, dtype=torch.int8).mT}, "elements of a row of the weights or of a bias that"),
        ({"out": torch.zeros(64, 2).mT}, "elements of a row of 'out' that do not lie side by side"),
        ({"x13_scale": torch.ones(2, dtype=HALF)}, "scales of float32"),
        ({"block_size": 64}, "blocks of fp8, whose side is a power of two from 32 on"),
    ],
)
def test_what_no_kernel_of_quantized_experts_takes_is_declined_in_words(other: dict[str, Any], said: Any) -> None:
    found = quantized_moe.supports_scaled(**{**experts_of(torch.int8), **other})
    assert found is True if said is True else str(found).startswith(said)


def test_rows_that_no_program_holds_are_declined_unless_they_have_groups() -> None:
    wide = {"w2": torch.empty(2, 64, 40000, dtype=FP8, device="meta")}
    found = quantized_moe.supports_scaled(**{**experts_of(FP8), **wide})
    assert found == "more than 32768 elements with one scale"
    assert quantized_moe.supports_scaled(**{**experts_of(FP8), **wide, "block_size": 128}) is True


PLANS = """
import json, sys
import torch
from fl_dispatch.backends.reference.impl import moe as references
from fl_dispatch.backends.triton.impl import quantized_moe
from fl_dispatch.ops.inputs import mixtures
from fl_dispatch.ops.inputs.mixtures import Mixture

host, wrong = torch.device("cpu"), []
widened = lambda one: one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
for tokens in json.loads(sys.argv[1]):
    mixture = Mixture(tokens, 3, 2, 96, 40, local=[2, 0])
    for name, made in {
        "scaled_moe": lambda random: mixtures.scaled(torch.float16, host, random, torch.int8),
        "weight_only_moe": lambda random: mixtures.weight_only(torch.float16, host, random, 4, 8, True),
    }.items():
        args = made(torch.Generator().manual_seed(tokens))(mixture)
        found = getattr(quantized_moe, name)(*args).double()
        right = getattr(references, name)(*map(widened, args))
        far = float((found - right).abs().max() / right.std())
        if not far < 4e-3:
            wrong.append([name, tokens, far])
print(json.dumps(wrong))
"""


def test_experts_of_every_plan_are_right_in_the_interpreter() -> None:
    """Three experts, one of them elsewhere; groups of 8, which matrix units do not take."""
    tokens = [1, 8, 16, 64, 128]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PLANS, json.dumps(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


CHOSEN_BY_KEY = """
import json
import torch
from fl_dispatch.backends.reference.impl import routing as references
from fl_dispatch.backends.triton.impl import routing
from fl_dispatch.ops import OPERATORS

routing.MANY_TOKENS = 5
launched, launch = [0], routing._launch
def counted(*args, **options):
    launched[0] += 1
    launch(*args, **options)
routing._launch = counted
wrong = []
for name in ("topk_softmax", "topk_sigmoid", "grouped_topk"):
    for dtype in (torch.bfloat16, torch.float32):
        for sample in OPERATORS[name].samples(dtype, torch.device("cpu"), torch.Generator().manual_seed(1)):
            if len(sample.args[0]) > 40:
                continue
            weights, ids = getattr(routing, name)(*sample.args)
            args = [one.double() if isinstance(one, torch.Tensor) else one for one in sample.args]
            right, best = getattr(references, name)(*args)
            if not torch.equal(ids, best) or not torch.allclose(weights, right, rtol=1e-5, atol=1e-6):
                wrong.append([name, str(dtype), sample.label])
low = torch.full((1, 16), float("-inf"))
low[0, 9] = 0.0
weights, ids = routing.topk_softmax(low, 3, True)
print(json.dumps([launched[0] > 30, wrong, ids.tolist(), weights.tolist()]))
"""


def interpreted(script: str) -> Any:
    """The last line that a script prints in Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_integers_choose_the_same_experts_in_the_interpreter() -> None:
    ran, wrong, ids, weights = interpreted(CHOSEN_BY_KEY)
    assert ran
    assert wrong == []
    assert ids == [[9, 0, 1]]
    assert weights == [[1.0, 0.0, 0.0]]

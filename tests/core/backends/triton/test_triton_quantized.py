"""Which form of a quantized product runs; plans of tiles for experts, and candidates, in Triton's interpreter.

That products are right: test_triton.py, and tests/gpu.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from fl_dispatch.backends.triton.impl.experts import fused_moe, quantized_moe
from fl_dispatch.backends.triton.impl.products import scaled_linear, weight_only_linear
from fl_dispatch.ops import OPERATORS
from fl_dispatch.ops.quantized_moe import sums_narrow
from interpreting import run

FP8 = torch.float8_e4m3fn
HALF, SINGLE = torch.float16, torch.float32


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that would run."""
    names: list[str] = []
    few = ("row", "rows", "word_row", "word_rows", "add", "dequantize")
    for module, kernels in ((scaled_linear, ("row", "rows", "tiles")), (weight_only_linear, few)):
        for name in kernels:
            monkeypatch.setattr(module, f"_launch_{name}", lambda *args, name=name, **options: names.append(name))
    return names


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [
        (0, []),
        (1, ["row"]),
        (2, ["rows"]),
        (scaled_linear.SOME_ROWS, ["rows"]),
        (scaled_linear.SOME_ROWS + 1, ["tiles"]),
    ],
)
def test_rows_decide_the_form_of_a_product_of_two_quantized_sides(
    rows: int, kernels: list[str], launched: list[str]
) -> None:
    x, weight = torch.zeros(rows, 64, dtype=FP8), torch.zeros(48, 64, dtype=FP8)
    found = scaled_linear.scaled_linear(x, torch.ones(rows, 1), weight, torch.ones(48, 1))
    assert launched == kernels
    assert (found.shape, found.dtype) == ((rows, 48), torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "columns", "blocks", "tile"),
    [
        (4096, 4096, 0, scaled_linear.TILES[0]),
        (256, 6144, 0, scaled_linear.TILES[1]),
        (256, 4096, 128, scaled_linear.BLOCKS_TILES[0]),
        (256, 2048, 128, scaled_linear.BLOCKS_TILES[1]),
        (1024, 576, 128, scaled_linear.BLOCKS_TILES[0]),
        (65, 64, 0, scaled_linear.TILES[-1]),
        (7, 28672, 0, (16, *scaled_linear.WIDE)),
        (7, 28672, 128, (16, *scaled_linear.BLOCKS_MIDDLE)),
        (33, 4096, 128, (64, *scaled_linear.BLOCKS_NARROW)),
        (17, 2048, 128, (32, *scaled_linear.BLOCKS_SLIM)),
        (32, 2112, 128, (32, *scaled_linear.BLOCKS_NARROW)),
        (16, 2048, 128, (16, *scaled_linear.BLOCKS_NARROW)),
        (33, 2048, 128, (64, *scaled_linear.BLOCKS_NARROW)),
        (64, 14336, 0, (64, *scaled_linear.MIDDLE)),
        (64, 6144, 0, (64, *scaled_linear.MIDDLE)),
        (33, 4096, 0, (64, *scaled_linear.NARROW)),
    ],
)
def test_a_tile_leaves_no_processor_idle_where_that_can_be(
    rows: int, columns: int, blocks: int, tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled_linear, "processors", lambda device: 132)
    monkeypatch.setattr(scaled_linear, "shared_memory", lambda device: 227 << 10)
    assert scaled_linear._tile(rows, columns, torch.device("meta"), blocks) == tile


@pytest.mark.parametrize(("room", "parts"), [(227, 4), (163, 2), (99, 2), (64, 1), (0, 4)])
def test_so_many_blocks_at_a_time_leave_room_for_three_stages(
    room: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        scaled_linear, "stages_that_fit", lambda device, stage, wanted: stages(room << 10, stage, wanted)
    )
    assert scaled_linear._parts(torch.device("meta"), (64 + 64) * 128, 4) == parts


def stages(room: int, stage: int, wanted: int) -> int:
    return max(2, min(wanted, room // stage)) if room else wanted


def test_wide_tiles_are_for_chips_with_room_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_linear, "processors", lambda device: 108)
    monkeypatch.setattr(scaled_linear, "shared_memory", lambda device: 163 << 10)
    assert scaled_linear._tile(64, 28672, torch.device("meta")) == (64, *scaled_linear.MIDDLE)


@pytest.mark.parametrize(
    ("rows", "group", "dtype", "kernels"),
    [
        (0, 64, HALF, []),
        (1, 64, HALF, ["word_row"]),
        (1, 24, SINGLE, ["word_row"]),
        (1, 20, HALF, ["row"]),
        (2, 64, HALF, ["word_rows"]),
        (2, 64, SINGLE, ["dequantize"]),
        (2, 16, HALF, ["dequantize"]),
        (2, 4096, HALF, ["word_rows", "add"]),
        (max(weight_only_linear.WORD_TILES), 64, HALF, ["word_rows"]),
        (max(weight_only_linear.WORD_TILES) + 1, 64, HALF, ["dequantize"]),
    ],
)
def test_rows_groups_and_types_decide_how_few_bits_are_multiplied(
    rows: int, group: int, dtype: torch.dtype, kernels: list[str], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_only_linear, "processors", lambda device: 4)
    inner = 2 * group
    weight, scale = torch.zeros(40, inner // 2, dtype=torch.uint8), torch.ones(40, 2, dtype=dtype)
    found = weight_only_linear.weight_only_linear(torch.zeros(rows, inner, dtype=dtype), weight, scale)
    assert launched == kernels
    assert (found.shape, found.dtype) == ((rows, 40), dtype)


@pytest.mark.parametrize(
    ("rows", "group", "dtype", "kernels"),
    [
        (1, 32, HALF, ["word_row"]),
        (1, 20, HALF, ["row"]),
        (2, 32, HALF, ["word_rows"]),
        (2, 32, SINGLE, ["dequantize"]),
        (2, 16, HALF, ["dequantize"]),
    ],
)
def test_float4_is_multiplied_in_the_forms_of_integers(
    rows: int, group: int, dtype: torch.dtype, kernels: list[str], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_only_linear, "processors", lambda device: 4)
    weight = torch.zeros(40, group, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    scale = torch.ones(40, 2, dtype=dtype)
    found = weight_only_linear.weight_only_linear(torch.zeros(rows, 2 * group, dtype=dtype), weight, scale)
    assert launched == kernels
    assert (found.shape, found.dtype) == ((rows, 40), dtype)


@pytest.mark.parametrize(("first", "between", "words"), [(0, 0, True), (4, 4, True), (1, 0, False), (0, 2, False)])
def test_columns_that_do_not_begin_with_a_word_are_read_in_bytes(
    first: int, between: int, words: bool, launched: list[str]
) -> None:
    """``first``: bytes before the first column; ``between``: those after each."""
    memory = torch.zeros(first + 40 * (64 + between), dtype=torch.uint8)
    weight = memory[first:].view(40, 64 + between)[:, :64]
    for rows in (1, 2):
        weight_only_linear.weight_only_linear(torch.zeros(rows, 128, dtype=HALF), weight, torch.ones(40, 2, dtype=HALF))
    assert launched == (["word_row", "word_rows"] if words else ["row", "rows"])


WORDS = """
import json
import torch
from fl_dispatch.backends.reference.impl import quantization as references
from fl_dispatch.backends.triton.impl.products import weight_only_linear

weight_only_linear.WORD_ROW, weight_only_linear.WORD_ENOUGH = (8, 64, 4), 4
weight_only_linear.processors = lambda device: 2
weight_only_linear.capability = lambda device: (9, 0)  # an NVIDIA GPU's matrix units take eight rows
weight_only_linear.SLICED_FROM, weight_only_linear.SLICED_WARPS = 37 * 128, (2, 4)
weight_only_linear.SLICED_DTYPES = (torch.float16,)  # the interpreter has products of bfloat16 wrong
random, launched, wrong = torch.Generator().manual_seed(1), [], []
for name in ("row", "rows", "word_row", "sliced_row", "word_rows", "add"):
    launch = getattr(weight_only_linear, "_launch_" + name)
    counted = lambda *args, launch=launch, name=name, **options: (launched.append(name), launch(*args, **options))
    setattr(weight_only_linear, "_launch_" + name, counted)
half, single = torch.float16, torch.float32
sizes = (1024, 128), (3072, 128), (2048, 256), (1152, 8), (1056, 24), (1040, 1040), (60, 20)
cases = [(1, inner, group, kind) for inner, group in sizes for kind in (half, single)]
cases += [(3, 96, 32, half), (16, 320, 320, half), (17, 1280, 128, half), (64, 640, 64, half)]
for rows, inner, group, kind in cases:
    for with_zero in (False, True):
        weight = torch.randint(0, 256, (37, inner // 2), generator=random, dtype=torch.uint8)
        scale = ((torch.rand(37, inner // group, generator=random) + 0.5) * inner**-0.5 / 4).to(kind)
        zero = torch.randint(-128, 128, scale.shape, generator=random, dtype=torch.int8) if with_zero else None
        x, bias = (torch.randn(*shape, generator=random).to(kind) for shape in ((rows, inner), (37,)))
        found = weight_only_linear.weight_only_linear(x, weight, scale, zero, bias).double()
        right = references.weight_only_linear(x.double(), weight, scale.double(), zero, bias.double())
        far = float((found - right).abs().max() / right.std())
        if not far < (4e-3 if kind is half else 4e-6):
            wrong.append([rows, inner, group, str(kind), with_zero, far])
print(json.dumps([sorted(set(launched)), wrong]))
"""


def test_words_have_the_numbers_of_their_bytes_in_the_interpreter() -> None:
    """Groups of each kind, zero points of the whole int8, columns in one piece and in several, a bias."""
    ran, wrong = interpreted(WORDS)
    assert ran == ["add", "row", "sliced_row", "word_row", "word_rows"]
    assert wrong == []


INTEGERS = """
import json
import torch
from fl_dispatch.backends.reference.impl import quantization as references
from fl_dispatch.backends.triton.impl.products import weight_only_linear

weight_only_linear.processors = lambda device: 2
random, kind, wrong = torch.Generator().manual_seed(1), torch.float16, []
draw = lambda least, most, *shape: torch.randint(least, most + 1, shape, generator=random)
for rows in (2, 8, 9, 33, 64):
    for form in ("offset 8", "zero points", "e2m1"):
        weight, scale = draw(0, 255, 200, 320).byte(), 2.0 ** draw(-3, 3, 200, 5).to(kind)
        zero = draw(-16, 31, 200, 5).to(torch.int8) if form == "zero points" else None
        weight = weight.view(torch.float4_e2m1fn_x2) if form == "e2m1" else weight
        x, bias = draw(-4, 4, rows, 640).to(kind), draw(-64, 64, 200).to(kind)
        found = weight_only_linear.weight_only_linear(x, weight, scale, zero, bias)
        right = references.weight_only_linear(x.double(), weight, scale.double(), zero, bias.double()).to(kind)
        if not torch.equal(found, right):
            wrong.append([rows, form, float((found - right).abs().max())])
print(json.dumps(wrong))
"""


def test_words_of_integers_have_exact_products_in_the_interpreter() -> None:
    """A tile of each size, with rows and columns that do not fill it; powers of two as scales."""
    assert interpreted(INTEGERS) == []


# -- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plans",
    [
        fused_moe.PLANS,
        quantized_moe.SCALED_PLANS,
        quantized_moe.PACKED_PLANS,
    ],
)
def test_pairs_of_an_expert_decide_the_tiles(plans: fused_moe.Plans) -> None:
    assert plans.choose(1, 8, 128) is plans.choose(64, 8, 128) is plans.few[0][1]
    assert plans.choose(129, 8, 128) is plans.choose(256, 8, 128) is plans.few[1][1]
    assert plans.choose(512, 8, 128) is plans.few[2][1]
    assert plans.choose(513, 8, 128) is plans.choose(16384, 8, 128) is plans.many


@pytest.mark.parametrize("plans", [quantized_moe.BLOCK_PLANS, quantized_moe.EXACT_BLOCK_PLANS])
def test_pairs_of_an_expert_decide_the_tiles_of_blocks(plans: fused_moe.Plans) -> None:
    assert plans.choose(16, 8, 128) is plans.few[0][1]
    assert plans.choose(17, 8, 128) is plans.choose(256, 8, 128) is plans.few[1][1]
    assert plans.choose(257, 8, 128) is plans.choose(512, 8, 128) is plans.few[2][1]
    assert plans.choose(513, 8, 128) is plans.many


@pytest.mark.parametrize(("tokens", "narrow"), [(1, False), (512, False), (513, True), (1024, True)])
def test_many_pairs_of_bfloat16_alone_are_summed_with_fewer_bits(tokens: int, narrow: bool) -> None:
    """From the pairs on that get the last plan; the accepted error has grown by then."""
    half, ids = torch.empty(0, dtype=torch.bfloat16), torch.empty(tokens, 8, dtype=torch.int32)
    assert sums_narrow(torch.bfloat16, ids.numel(), 128, 32) is narrow
    assert not sums_narrow(torch.bfloat16, ids.numel(), 128, 0)
    assert not sums_narrow(torch.float32, ids.numel(), 128, 32)
    assert not sums_narrow(torch.float16, ids.numel(), 128, 32)
    operator, given = OPERATORS["scaled_moe"], {**experts_of(FP8), "hidden_states": half, "block_size": 32}
    few, many = ({**given, "w13": torch.empty(128, 0, 0), "topk_ids": each} for each in (ids[:1], ids))
    elsewhere = {**many, "w13": torch.empty(1, 0, 0), "expert_map": torch.empty(128, dtype=torch.int32)}
    usual, accepted, mapped = (
        operator.tolerance(half.dtype, operator.bind((), call)) for call in (few, many, elsewhere)
    )
    assert (accepted.atol > usual.atol + 0.05) is (tokens > 256)
    assert mapped == accepted


@pytest.mark.parametrize(("tokens", "sorts"), [(1, False), (2, False), (3, True)])
def test_few_pairs_are_not_sorted(tokens: int, sorts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_pairs = torch.zeros(48, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.zeros(1)
    monkeypatch.setattr(fused_moe, "moe_align_block_size", lambda *args: sorted_pairs)
    order = fused_moe.arrange(torch.zeros(tokens, 2, dtype=torch.int32), None, 16, 16)
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


def supports_scaled(arguments: dict[str, Any]) -> bool | str:
    """What the predicate says of a call, of which it takes what it looks at."""
    looked_at = inspect.signature(quantized_moe.supports_scaled).parameters
    return quantized_moe.supports_scaled(**{name: one for name, one in arguments.items() if name in looked_at})


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
        ({"block_size": 64}, "blocks of fp8 with a side that is a power of two from 32 on"),
    ],
)
def test_what_no_kernel_of_quantized_experts_takes_is_declined_in_words(other: dict[str, Any], said: Any) -> None:
    found = supports_scaled({**experts_of(torch.int8), **other})
    assert found is True if said is True else str(found).startswith(said)


def test_rows_that_no_program_holds_are_declined_unless_they_have_groups() -> None:
    wide = {"w2": torch.empty(2, 64, 40000, dtype=FP8, device="meta")}
    found = supports_scaled({**experts_of(FP8), **wide})
    assert found == "more than 32768 elements with one scale"
    assert supports_scaled({**experts_of(FP8), **wide, "block_size": 128}) is True


PLANS = """
import json, sys
import torch
from fl_dispatch.backends.triton.impl.experts import quantized_moe
from fl_dispatch.ops import OPERATORS
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
        right = OPERATORS[name].reference(*map(widened, args))
        far = float((found - right).abs().max() / right.std())
        if not far < 4e-3:
            wrong.append([name, tokens, far])
print(json.dumps(wrong))
"""


def test_experts_of_every_plan_are_right_in_the_interpreter() -> None:
    """Three experts, one of them elsewhere; groups of 8, which matrix units do not take."""
    tokens = [1, 8, 16, 64, 128]
    assert json.loads(run(PLANS, json.dumps(tokens))) == []


SIDES = """
import json, sys
import torch
from fl_dispatch.backends.triton.impl.experts import quantized_moe
from fl_dispatch.ops.inputs import mixtures
from fl_dispatch.ops.inputs.mixtures import Mixture

host, forms, cases, launch = torch.device("cpu"), set(), [], quantized_moe._launch_scaled
names = quantized_moe._scaled.arg_names

def noted(grid, tensors, numbers, *, sizes, **options):
    forms.add(dict(zip(names, (*tensors, *sizes, *numbers)))["EXACT"])
    launch(grid, tensors, numbers, sizes=sizes, **options)

quantized_moe._launch_scaled = noted
for tokens in json.loads(sys.argv[1]):
    made = mixtures.scaled(torch.bfloat16, host, torch.Generator().manual_seed(tokens), torch.float8_e4m3fn, block=32)
    half, *rest = made(Mixture(tokens, 3, 2, 96, 40, local=[2]))
    seen = []
    for x in (half, half.float()):
        forms.clear()
        result = quantized_moe.scaled_moe(x, *rest).float()
        seen.append([result, sorted(forms)])
    (found, by_half), (right, by_wide) = seen
    cases.append([tokens, by_half, by_wide, float((found - right).abs().max()) <= 0.1 * float(right.std())])
print(json.dumps(cases))
"""


def test_blocks_are_multiplied_alike_from_either_side_in_the_interpreter() -> None:
    """Float32 is exact everywhere; bfloat16 in the first product alone, and from many pairs on nowhere."""
    tokens = [1, 8, 32, 64]
    expected = [[count, [False] if count > 48 else [False, True], [True], True] for count in tokens]
    assert json.loads(run(SIDES, json.dumps(tokens))) == expected


READS = """
import json
import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder
from fl_dispatch.backends.triton.impl.products import scaled_linear

addresses, load = [], InterpreterBuilder.create_masked_load

def noted(self, ptrs, mask, *others, **named):
    addresses.append(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].ravel())
    return load(self, ptrs, mask, *others, **named)

InterpreterBuilder.create_masked_load = noted
found = []
for rows, dtype, block in ((70, torch.int8, 0), (130, torch.float8_e4m3fn, 32)):
    addresses.clear()
    x, weight = (torch.ones(count, 96, dtype=dtype) for count in (rows, 100))
    across, down = (3, 4) if block else (1, 100)
    scaled_linear.scaled_linear(x, torch.ones(rows, across), weight, torch.ones(down, across), None, "bfloat16", block)
    places = np.concatenate(addresses) - x.data_ptr()
    times = np.bincount(places[(places >= 0) & (places < x.numel())], minlength=x.numel())
    found.append([int(times.min()), int(times.max())])
print(json.dumps(found))
"""


def test_rows_that_a_tile_lacks_are_not_read_in_the_interpreter() -> None:
    """Each element once for all columns of a tile, so never again for a row that is not there.

    Programs that all read the last row in their places would wait for each other.
    """
    for least, most in json.loads(run(READS)):
        assert 1 <= least == most


CHOSEN_BY_KEY = """
import json
import torch
from fl_dispatch.backends.reference.impl import routing as references
from fl_dispatch.backends.triton.impl.experts import routing
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
    return json.loads(run(script).splitlines()[-1])


def test_integers_choose_the_same_experts_in_the_interpreter() -> None:
    ran, wrong, ids, weights = interpreted(CHOSEN_BY_KEY)
    assert ran
    assert wrong == []
    assert ids == [[9, 0, 1]]
    assert weights == [[1.0, 0.0, 0.0]]


ALIGNED_AMONG_OTHERS = """
import json, torch
from fl_dispatch.backends.triton.impl.experts import alignment

empty, made, count, counted = torch.Tensor.new_empty, [], alignment._launch_count, []

def amid(self, size, **options):  # what is behind it belongs to others
    size = size if isinstance(size, int) else size[0]
    made.append(empty(self, size + 4096, **options).fill_(-7))
    return made[-1][:size]

def counting(*args, **options):
    counted.append(True)
    count(*args, **options)

torch.Tensor.new_empty, alignment._launch_count = amid, counting
found = []
for tokens, experts, block in ((1, 8, 16), (5, 60, 7), (33, 8, 64), (700, 64, 16)):
    made.clear(), counted.clear()
    ids = torch.randn(tokens, experts).topk(2).indices.int()
    results = alignment.moe_align_block_size(ids, block, experts)
    found.append([len(counted), all(bool((each[-4096:] == -7).all()) for each in made), int(results[2])])
print(json.dumps(found))
"""


def test_pairs_are_sorted_without_a_store_beyond_the_results_in_the_interpreter() -> None:
    found = interpreted(ALIGNED_AMONG_OTHERS)
    assert [counted for counted, *_ in found] == [0, 0, 0, 1]  # many pairs are counted by a kernel of their own
    assert all(within for _, within, _ in found)
    assert all(padded > 0 for *_, padded in found)

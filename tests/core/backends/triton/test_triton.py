"""Our Triton kernels in Triton's interpreter, on the CPU; on a GPU tests/gpu runs all inputs.

bfloat16 is left out: the interpreter's matrix product of it is wrong. So is its cast to fp8, which loses a carry: there
our kernels round bit by bit (``quantize.narrowed``).
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_dispatch import get_default_manager
from fl_dispatch.backends.triton.register_ops import IMPL_ID, PRIORITY, ROWS
from fl_dispatch.devices import CPU
from fl_dispatch.devices.triton import why_unavailable
from interpreting import run
from sampling import drawn

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

VERIFY = """
import json, sys
import torch
from fl_dispatch import get_default_manager
from fl_dispatch.evidence.verify import implementations, verify
from fl_dispatch.ops import OPERATORS

import numpy as np
from triton.runtime.interpreter import ScanOps

def scan(self, inputs):  # the interpreter's own goes element by element
    def along(tensor):
        return np.moveaxis(tensor.handle.data, self.axis, 0)

    def each(datas):
        return tuple(self.to_tensor(data, tensor.dtype) for data, tensor in zip(datas, inputs))

    datas = list(map(along, inputs))
    results, so_far = [np.empty_like(data) for data in datas], None
    for place in range(len(datas[0])):
        now = each([data[place] for data in datas])
        so_far = now if so_far is None else self.combine_fn.fn(*so_far, *now)
        for result, tensor in zip(results, so_far):
            result[place] = tensor.handle.data
    return list(each([np.moveaxis(result, 0, self.axis) for result in results]))

ScanOps.generic_scan = scan
manager, device, rows = get_default_manager(), torch.device("cpu"), []
for name, labels in json.loads(sys.argv[1]).items():
    (impl,) = implementations(manager, [name], ["default.triton"])
    for dtype in (torch.float16, torch.float32):
        made = filter(None, (OPERATORS[name].samples, OPERATORS[name].probes))
        samples = [sample for make in made for sample in make(dtype, device, torch.Generator().manual_seed(0))]
        chosen = [sample for sample in samples if sample.label in labels]
        found = verify(manager, impl, dtype, device, samples=chosen, repeats=1, race_calls=3)
        rows.append([name, found.dtype, found.samples == len(labels), found.problems])
print(json.dumps(rows))
"""

SMALL = {
    "linear": [
        "1 of 256 to 6144",
        "7 with bias",
        "1 of 1431 to 77",
        "3 of 1431 to 77",
        "1, rows apart",
        "3, rows apart",
        "1, weights by columns",
        "one column",
        "a vector",
        "3-d 2x3",
        "empty batch",
    ],
    "fused_linear": [
        "1 of 2048 to 1024",
        "1 of 1024 to 768, no residual",
        "1 of 512 to 384, bias",
        "1 of 1024 to 512, no norm, gated",
        "float8, 1 of 3072 to 256, no norm",
        "float8, bias, no norm",
        "float8, one scale, no norm",
        "odd sizes",
        "odd sizes, float8, no norm, gated",
        "a residual and no norm",
        "epsilon 0.01",
        "weights' rows apart",
        "a vector",
    ],
    "lora_shrink": [
        "one token, 3 parts",
        "decode, 2 adapters and none",
        "prefill, 2 parts",
        "empty mapping",
        "a long row",
        "odd sizes",
        "rank 128",
        "a scale",
        "rows apart",
        "empty batch",
    ],
    "lora_expand": [
        "one token, 3 parts",
        "decode, 2 adapters and none",
        "prefill, 2 parts",
        "empty mapping",
        "a part of the columns",
        "odd sizes",
        "rank 128",
        "products as wide as the factors",
        "rows apart",
        "fewer columns of a factor",
        "empty batch",
    ],
    "quantize": [
        "int8, prefill, 200 tokens",
        "int8, groups of 128",
        "int8, one scale for all rows",
        "int8, a scale that is given, too small for some",
        "int8, a short last group",
        "int8, odd width",
        "int8, 3-d",
        "int8, row stride larger than the row",
        "int8, rows of zeros",
        "int8, NaN and infinities",
        "int8, NaN and infinities, a scale a row",
        "int8, NaN and infinities, a scale that is given",
        "int8, empty batch",
        "float8_e4m3fn, groups of 128",
        "float8_e4m3fn, one scale for all rows",
        "float8_e4m3fn, a scale that is given, too small for some",
        "float8_e4m3fn, odd width",
        "float8_e4m3fn, small numbers",
        "float8_e4m3fn, rows of zeros",
        "float8_e4m3fn, NaN and infinities",
        "float8_e4m3fn, NaN and infinities, a scale a row",
        "float8_e4m3fn, NaN and infinities, a scale that is given",
    ],
    "rms_norm_quantize": [
        "int8, decode, 32 tokens",
        "int8, one token",
        "int8, no residual",
        "int8, groups of 128",
        "int8, groups of 128, no residual",
        "int8, a scale that is given",
        "int8, one scale for all rows",
        "int8, a short last group",
        "int8, groups of 24",
        "int8, odd width",
        "int8, 3-d",
        "int8, no weight",
        "int8, row stride larger than the row",
        "int8, rows of zeros",
        "int8, empty batch",
        "float8_e4m3fn, groups of 128",
        "float8_e4m3fn, odd width",
        "float8_e4m3fn, rows of zeros",
    ],
    "silu_and_mul_quantize": [
        "int8, decode, 32 tokens",
        "int8, groups of 128",
        "int8, a scale that is given",
        "int8, one scale for all rows",
        "int8, a short last group",
        "int8, groups of 24",
        "int8, odd width",
        "int8, 3-d",
        "int8, row stride larger than the row",
        "int8, rows of zeros",
        "int8, empty batch",
        "float8_e4m3fn, groups of 24",
        "float8_e4m3fn, a scale that is given",
        "float8_e4m3fn, rows of zeros",
    ],
    "scaled_linear": [
        "int8, one row, bias",
        "int8, 32 of 512 to 256",
        "int8, 100 of 256 to 384",
        "int8, bias",
        "int8, odd sizes",
        "float8_e4m3fn, one row, bias",
        "float8_e4m3fn, 32 of 512 to 256",
        "float8_e4m3fn, 100 of 256 to 384",
        "float8_e4m3fn, one scale for the weight",
        "float8_e4m3fn, odd sizes",
        "float8_e4m3fn, 3-d",
        "float8_e4m3fn, empty batch",
        "blocks of 128, 1 of 1024 to 512",
        "blocks of 128, one row",
        "blocks of 128, 33 of 512 to 256",
        "blocks of 128, 100 of 384 to 256",
        "blocks of 128, short last ones",
    ],
    "weight_only_linear": [
        "4 bits, one row, zero points, groups of 32",
        "4 bits, 32 of 512 to 128, groups of 128",
        "4 bits, 80 of 256 to 96, groups of 128",
        "8 bits, one row, zero points, groups of 32",
        "4 bits, zero points, groups of 32",
        "4 bits, small groups, odd columns",
        "8 bits, zero points, groups of 32",
        "8 bits, one scale a column",
        "float8, one scale a column",
        "float8, 1 of 1024 to 256, groups of 32",
        "float8, 6 of 256 to 192, groups of 32",
        "float8, 80 of 256 to 96, groups of 32",
        "3-d, bias",
        "4 bits, empty batch",
    ],
    "silu_and_mul": [
        "7x1536",
        "3-d 2x5x64",
        "empty batch",
        "odd width 67",
        "row stride larger than the row",
        "gate scale 300",
    ],
    "gelu_and_mul": ["odd width 67, none", "odd width 67, tanh", "batch dimensions swapped, tanh"],
    "rms_norm": [
        "7x5120 with residual",
        "3-d heads 5x8x128",
        "no weight",
        "odd hidden size 67",
        "scale 300",
        "5000 short rows",
    ],
    "gemma_rms_norm": ["3-d heads 5x8x128", "row stride larger than the row", "odd hidden size 67", "empty batch"],
    "rms_norm_gated": [
        "decode, 32 tokens, 32 heads of 128",
        "heads 1x16x128, sigmoid",
        "gate first, groups of 512",
        "groups of 64",
        "cut out of one product",
        "no weight",
        "gate first, sigmoid, scale 300",
        "odd size 67",
        "empty batch",
    ],
    "rotary_embedding": [
        "decode, 32 tokens",
        "interleaved, 16 tokens",
        "no key",
        "not in place, half of the head, interleaved",
        "int32 positions",
        "float32 table",
        "rotary dimension 20 of 24",
        "empty batch",
    ],
    "topk_softmax": ["60 experts", "bias, not renormalized", "row stride larger than the row", "every expert"],
    "topk_sigmoid": ["best of two", "every expert", "empty batch"],
    "grouped_topk": ["softmax with a bias, renormalized", "every group", "every expert of one group", "empty batch"],
    "moe_align_block_size": [
        "prefill, 130 tokens, 64 experts",
        "a quarter of the experts is here",
        "padding tokens",
        "no expert is here",
        "blocks of one",
        "empty batch",
    ],
    "moe_sum": ["one token", "row stride larger than the row", "one expert, odd hidden size", "empty batch"],
    "fused_moe": [
        "one token",
        "swigluoai, biases",
        "weights on the input, biases",
        "gelu, odd sizes",
        "relu2_no_mul",
        "padding tokens with out",
        "empty rank: no expert is here",
        "empty batch",
    ],
    "scaled_moe": [
        "int8, one token",
        "int8, half of the experts is here",
        "int8, no gate, biases",
        "int8, weights on the input, odd sizes",
        "int8, padding tokens with out",
        "int8, empty rank: no expert is here",
        "int8, empty batch",
        "int8, scales of the rows given, 9 tokens",
        "float8_e4m3fn, one token",
        "float8_e4m3fn, no gate, biases",
        "float8_e4m3fn, padding tokens with out",
        "float8_e4m3fn, scales of the rows given, 9 tokens",
        "float8_e4m3fn in blocks of 128, 17 tokens",
        "float8_e4m3fn in blocks of 32, short last ones, biases",
        "float8_e4m3fn in blocks of 32, many tokens of two experts",
    ],
    "weight_only_moe": [
        "4 bits, groups of 32, half of the experts is here",
        "4 bits, groups of 32, swigluoai, biases",
        "4 bits, groups of 32, padding tokens with out",
        "4 bits, groups of 32, empty rank: no expert is here",
        "4 bits, groups of 32, empty batch",
        "4 bits, zero points, groups of 16, 9 tokens",
        "4 bits, one scale a column, one token",
        "8 bits, groups of 32, weights on the input, biases",
        "float8, groups of 32, half of the experts is here",
        "8 bits, zero points, groups of 16, 9 tokens",
        "8 bits, one scale a column, one token",
        "rows of int8, 9 tokens",
        "rows of mxfp4, no gate, padding tokens with out",
        "rows of mxfp8, weights on the input, biases",
        "rows of nvfp4, 9 tokens",
        "rows of nvfp4, one token, half of the experts is here",
        "rows of nvfp4, weights on the input, biases",
    ],
    "kv_cache_write": [
        "token-major cache",
        "padded and skipped tokens",
        "value narrower than key",
        "fp8 cache, token-major",
        "fp8 cache, value narrower than key",
        "fp8 cache, NaN and infinities",
        "fp8 cache, nothing to round",
        "fp8 cache, empty batch",
        "int8 cache, token-major",
        "int8 cache, value narrower than key",
        "int8 cache, NaN and infinities",
        "int8 cache, empty batch",
        "empty batch",
    ],
    "rotary_embedding_kv_cache_write": [
        "one token",
        "half of the head, token-major cache",
        "interleaved, padded and skipped tokens",
        "interleaved, half of the head",
        "24 heads of 80 elements, 3 of keys",
        "fp8 cache, nothing to round",
        "value narrower than key, int32 positions",
        "float32 table",
        "rotary dimension 20 of 24, block size 1",
        "only skipped tokens",
        "only padding",
        "empty batch",
    ],
    "paged_attention": [
        "decode with out, block size 32",
        "padded batch with out",
        "not causal, sliding window 5",
        "value narrower than key",
        "fp8 cache, decode",
        "fp8 cache, alibi, sinks",
        "fp8 cache, value narrower than key",
        "int8 cache, decode",
        "int8 cache, alibi, sinks",
        "int8 cache, value narrower than key",
        "softcap 2, alibi, sinks",
        "sliding window 1",
        "empty batch",
    ],
    "mla_decode": [
        "rank 24, rotary part 8, odd heads",
        "cache row stride larger than the row",
        "fp8 cache, 3 tokens a request",
        "fp8 cache, row stride, not causal",
        "not causal",
        "query in two parts, rank 24, odd heads",
        "no rotary part",
        "empty batch",
    ],
    "mla_prefill": [
        "with out, padded batch",
        "more queries than keys, causal",
        "head size 40, value 24, odd heads",
        "empty batch",
    ],
    "index_key_write": [
        "decode, 8 tokens, scales beside the keys",
        "prefill, 70 tokens, not quantized",
        "padded rows, scales apart",
        "two groups, the last one short",
        "dimension 24, not quantized",
        "empty batch",
    ],
    "index_topk": [
        "DeepSeek-V3.2, decode, 2,100 tokens",
        "mixed batch, top 64",
        "mixed batch, top 64, fp8",
        "as many tokens as are taken, and one more",
        "one best token, odd sizes",
        "requests without new tokens",
        "empty batch",
        "9,000 tokens, top 512",
        "maxima larger than needed",
        "NaN in unused slots, fp8",
    ],
    "mla_sparse": [
        "decode, 16 heads, 2,048 of 2,100",
        "query in two parts, fp8 cache",
        "fp8 cache",
        "rank 24, rotary part 8, odd heads",
        "cache row stride larger than the row",
        "no rotary part",
        "rows that list nothing",
        "requests without new tokens",
        "empty batch",
        "NaN in slots that are not listed",
    ],
    "causal_conv1d": [
        "with bias, padded pages",
        "channels first",
        "every request has a state",
        "a request without tokens, padded batch",
        "no activation, width 3",
        "odd number of channels",
        "empty batch",
    ],
    "causal_conv1d_update": [
        "with bias, padded pages",
        "channels first",
        "no activation, width 3",
        "odd number of channels",
        "empty batch",
    ],
    "gated_delta_rule": [
        "padded pages and batch",
        "every request has a state",
        "states of the model's type",
        "keys side by side, padded pages",
        "key size 24, value size 40, odd heads",
        "empty batch",
    ],
    "gated_delta_rule_update": [
        "padded pages",
        "states of the model's type",
        "keys side by side, padded pages",
        "key size 24, value size 40, odd heads",
        "empty batch",
    ],
    "selective_scan": [
        "5 prompts of 1 to 130 tokens",
        "prompts that go on, and new ones",
        "padded pages and batch",
        "every request has a state",
        "states of the model's type",
        "Mamba: a decay for each column",
        "neither d nor a bias",
        "head size 24, state size 40, 3 groups",
        "decays of columns, head size 3, 2 groups",
        "one token of one element",
        "empty batch",
        "1,100 tokens",
        "lengths around 64 and 128",
        "NaN in slots of new requests",
        "300 sequences of 1 to 5 tokens",
    ],
    "selective_state_update": [
        "1 request, 48 heads",
        "8 requests",
        "padded pages",
        "states of the model's type",
        "Mamba: a decay for each column",
        "neither d nor a bias",
        "head size 24, state size 40, 3 groups",
        "decays of columns, head size 3, 2 groups",
        "one element",
        "empty batch",
        "520 requests",
    ],
}
DRAWN = drawn(list(SMALL), len(SMALL) // 2, "kernels in Triton's interpreter")


@pytest.fixture(scope="module")
def interpreted() -> list[Any]:
    rows: list[Any] = json.loads(run(VERIFY, json.dumps({name: SMALL[name] for name in DRAWN})))
    return rows


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", DRAWN)
def test_a_kernel_is_right_in_the_interpreter(interpreted: list[Any], name: str, dtype: str) -> None:
    ((_, _, all_ran, problems),) = [row for row in interpreted if row[:2] == [name, dtype]]
    assert problems == []
    assert all_ran


SHARES = """
from fl_dispatch.backends.triton.impl.attention import index_topk
index_topk.SELECTING = index_topk.SELECTING_DECODE = (64, 32, {bits}, 4)
"""


@needs_triton
@pytest.mark.parametrize("bits", [8, 11])
def test_a_list_is_right_whose_scores_several_programs_share(bits: int) -> None:
    """Of 300 tokens three programs take up to 128 each, and list 64; one takes what they list."""
    labels = ["mixed batch, top 64", "mixed batch, top 64, fp8", "requests without new tokens"]
    for *_, all_ran, problems in json.loads(run(SHARES.format(bits=bits) + VERIFY, json.dumps({"index_topk": labels}))):
        assert problems == []
        assert all_ran


TIES = """
import json
import torch
from fl_dispatch.backends.triton.impl.attention import index_topk
starts, lengths = torch.tensor([0, 1]).int(), torch.tensor([100]).int()
out = torch.full((2, 64), -7).int()
index_topk._best(torch.zeros(1, 128), starts, lengths, out[:1], 0, 64, (128, 32, 8, 4))
print(json.dumps(out.tolist()))
"""


@needs_triton
def test_of_equal_scores_the_first_are_listed_and_nothing_is_written_behind_a_list() -> None:
    assert json.loads(run(TIES)) == [[*range(64)], [-7] * 64]


SMALL_VALUES = """
import torch
from fl_dispatch.backends.reference.impl import attention as reference
from fl_dispatch.backends.triton.impl.attention import paged
generator = torch.Generator().manual_seed(0)
keys, values = (torch.randint(-127, 128, (4, 16, 1, 32), generator=generator).to(torch.int8) for _ in range(2))
key_scales, value_scales = torch.full((4, 16, 1), 1 / 127), torch.full((4, 16, 1), 1e-3 / 127)
query = torch.randn(1, 2, 32, generator=generator).half()
table, starts, lengths = torch.arange(4)[None].int(), torch.tensor([0, 1]).int(), torch.tensor([64]).int()
rest = (table, starts, lengths, 1, 64, 0.1)
scales = {"key_scales": key_scales, "value_scales": value_scales}
found, right = (m.paged_attention(query, keys, values, *rest, **scales).float() for m in (paged, reference))
print(float((found - right).norm() / right.norm()))
"""


@needs_triton
def test_a_cache_in_int8_keeps_small_values_in_float16() -> None:
    assert 0 < float(run(SMALL_VALUES)) < 2e-3


OLDER_GPU = """
import json, torch
from fl_dispatch import call_op, freeze_dispatch, get_default_manager
from fl_dispatch.backends.triton.impl import launch
from fl_dispatch.hosting.quantized.experts import Fp8Experts
launch.capability = lambda device: (8, 0)
manager, ran, ones = get_default_manager(), {}, torch.ones(48, 1)
freeze_dispatch(compiling=False)
manager.set_counting()
for kind in ("int8", "float8_e4m3fn"):
    manager.reset_counts()
    x, weight = (torch.zeros(rows, 64).to(getattr(torch, kind)) for rows in (2, 48))
    call_op("quantize", torch.zeros(2, 64), kind)
    call_op("scaled_linear", x, ones[:2], weight, ones)
    call_op("weight_only_linear", torch.zeros(2, 64), weight, ones)
    experts = torch.zeros(3, 64, 64).to(x.dtype)
    weights = (experts, torch.ones(3, 64, 1), experts, torch.ones(3, 64, 1))
    routing = (torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32), "relu2_no_mul")
    for name in ("scaled_moe", "weight_only_moe"):
        call_op(name, torch.zeros(2, 64), *weights, *routing)
    ran[kind] = sorted({impl_id for (_, impl_id), count in manager.call_counts().items() if count})
kind, layer = Fp8Experts(), torch.nn.Module()
for part in ("w13_weight", "w2_weight"):
    layer.register_parameter(part, torch.nn.Parameter(experts, requires_grad=False))
    layer.register_parameter(part + "_scale", torch.nn.Parameter(weights[1], requires_grad=False))
kind.process_weights_after_loading(layer)
print(json.dumps([ran, kind.waiting(layer, torch.float32, "relu2_no_mul"), kind.waiting(layer, torch.float32, "silu")]))
"""


@needs_triton
def test_fp8_is_left_to_others_where_it_does_not_compile() -> None:
    """By the choice itself: under frozen dispatch a kernel that declines would end the call."""
    names = ("quantize", "scaled_linear", "weight_only_linear", "scaled_moe", "weight_only_moe")
    per_op = ";".join(f"{name}=impl:default.triton|reference" for name in names)
    ran, *waiting = json.loads(run(OLDER_GPU, VLLM_FL_PER_OP=per_op))
    assert ran == {"int8": ["default.triton"], "float8_e4m3fn": ["reference.torch"]}
    assert waiting == 2 * ["Triton compiles fp8 from compute capability 8.9 on, and this is 8.0"]


def test_every_kernel_is_registered_below_flaggems_whether_or_not_it_can_run() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    for row in ROWS:
        found = manager.registry.get_implementation(row.op_name, row.impl_id)
        assert found is not None
        assert found.priority == PRIORITY < 150


def test_where_triton_cannot_run_the_decision_says_why() -> None:
    if not why_unavailable():
        pytest.skip("Triton can run here")
    entries = {entry.impl.impl_id: entry for entry in get_default_manager().explain("rms_norm").considered}
    assert entries[IMPL_ID].status == "skipped"
    assert entries[IMPL_ID].reason == why_unavailable()


def test_triton_is_not_imported_where_it_cannot_run() -> None:
    program = (
        "import sys, fl_dispatch; fl_dispatch.get_default_manager().ensure_initialized();"
        "from fl_dispatch.devices.triton import why_unavailable;"
        "print(not why_unavailable() or 'triton' not in sys.modules)"
    )
    assert run(program, TRITON_INTERPRET="0").strip() == "True"


class FakeDriver:
    """A driver of Triton's that serves tensors of one PyTorch type; an instance would need a context."""

    def __init__(self) -> None:
        raise AssertionError("the driver was made")

    @staticmethod
    def is_active() -> bool:
        return True


def serving(kind: str) -> Any:
    return lambda self: torch.device(kind, self.get_current_device())


@needs_triton
@pytest.mark.parametrize(
    ("device", "drivers", "why"),
    [
        ("meta", ["meta"], ""),
        ("meta", ["cuda", "meta"], ""),
        ("meta", ["cuda"], "no driver of Triton's serves device 'nimbus' ('meta'; active drivers: d0 for 'cuda')"),
        ("meta", [], "no driver of Triton's serves device 'nimbus' ('meta'; active drivers: none)"),
    ],
)
def test_the_kernels_are_there_where_a_driver_serves_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, drivers: list[str], why: str
) -> None:
    from triton import backends

    from fl_dispatch.devices import triton as availability

    made = {
        f"d{at}": SimpleNamespace(driver=type("Driver", (FakeDriver,), {"get_active_torch_device": serving(kind)}))
        for at, kind in enumerate(drivers)
    }
    monkeypatch.setattr(backends, "backends", made)
    spec = replace(CPU, name="nimbus", torch_type=device, triton=True)
    monkeypatch.setattr(availability, "detect_device", lambda: spec)
    assert availability.why_unserved.__wrapped__() == why


@needs_triton
def test_a_device_may_say_that_triton_never_serves_it() -> None:
    from fl_dispatch.devices import triton as availability

    assert availability.why_unserved.__wrapped__() == "Triton does not serve device 'cpu'"

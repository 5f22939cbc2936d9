"""Kernels that do at once what two others do: the same as one kernel after the other.

That they are right: test_triton.py, and tests/gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_dispatch import NotSupported
from interpreting import run

pytest.importorskip("triton")
quantized_rows = pytest.importorskip("fl_dispatch.backends.triton.impl.fusion.quantized_rows")
BENCHMARKS = Path(__file__).parents[4] / "benchmarks"

INTERPRETED = """
import json
import torch
from fl_dispatch.backends.triton.impl.fusion import quantized_rows
from fl_dispatch.backends.triton.impl.rows import activation, normalization, quantization

generator, results = torch.Generator().manual_seed(0), []
launched = []
for module in (activation, quantized_rows, normalization, quantization):
    for name in vars(module):
        if name.startswith("_launch") :
            kernel = getattr(module, name)
            def launch(*args, kernel=kernel, **options):
                launched.append(kernel.kernel.fn.__name__)
                return kernel(*args, **options)
            setattr(module, name, launch)

def same(found, expected):
    bits = [(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(found, expected, strict=True)]
    return all(torch.equal(one, other) for one, other in bits)

def compare(rows, width, dtype, group, scale, kind):
    x, residual = (torch.randn(rows, width, generator=generator).to(dtype) for _ in range(2))
    gates, weight = torch.randn(rows, 2 * width, generator=generator).to(dtype), torch.rand(width).to(dtype)
    y = normalization.rms_norm(x, None, weight, 1e-5)
    z, total = normalization.rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    g = activation.silu_and_mul(gates)
    expected = [quantization.quantize(one, kind, group, scale) for one in (y, z, g)]
    launched.clear()
    found = [
        quantized_rows.rms_norm_quantize(x, kind, None, weight, 1e-5, group, scale),
        quantized_rows.rms_norm_quantize(x, kind, residual.clone(), weight, 1e-5, group, scale),
        quantized_rows.silu_and_mul_quantize(gates, kind, group, scale),
    ]
    equal = [same(found[0], expected[0]), same(found[1], (total, *expected[1])), same(found[2], expected[2])]
    results.append([width, str(dtype), group, scale is not None, kind, equal, list(launched)])

for width in (64, 200, 384):
    for dtype in (torch.float16, torch.float32):
        for group, scale in ((0, None), (32, None), (24, None), (-1, torch.tensor([0.02])), (-1, None)):
            for kind in ("int8", "float8_e4m3fn"):
                compare(5, width, dtype, group, scale, kind)
compare(2, 33000, torch.float16, 128, None, "int8")
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def interpreted() -> list[Any]:
    return list(json.loads(run(INTERPRETED).splitlines()[-1]))


def test_joined_and_apart_are_the_same_bit_by_bit(interpreted: list[Any]) -> None:
    assert len(interpreted) == 3 * 2 * 5 * 2 + 1
    assert [case for case in interpreted if case[5] != [True] * 3] == []


def test_one_launch_does_both_where_a_program_holds_all_that_a_scale_depends_on(interpreted: list[Any]) -> None:
    for width, _, group, given, _, _, launched in interpreted:
        norms = ["_norm"] if (group in (0, 32) and width <= 32768) or given else ["_norm", "_quantize"]
        activation = ["_gated"] if group >= 0 or given else ["_gated", "_quantize"]
        assert launched == [*norms, *norms, *activation]


ROTATED = """
import json
import torch
from fl_dispatch.backends.triton.impl.attention import cache
from fl_dispatch.backends.triton.impl.fusion import rotary_cache
from fl_dispatch.backends.triton.impl.rows import rotary
from fl_dispatch.ops.inputs import paged

generator, results, launched = torch.Generator().manual_seed(0), [], []
kernel = rotary_cache._launch

def launch(*args, **options):
    launched.append(args[0][0])
    return kernel(*args, **options)

rotary_cache._launch = launch

def same(found, expected):
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))

def random(dtype, *shape):
    return torch.randn(*shape, generator=generator).to(dtype)

def compare(label, dtype, tokens, heads, sizes, interleaved=False, layout="head-major", block=16, skip=(), padding=0,
            table=None, scales=(None, None), index=torch.int64):
    (heads, kv_heads), (dim, rotated, dim_v), rows = heads, sizes, tokens + padding
    projection = random(dtype, rows, heads * dim + kv_heads * (dim + dim_v))
    parts = projection.split([heads * dim, kv_heads * dim, kv_heads * dim_v], -1)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim_v))
    query, key, value = (part.view(rows, *shape) for part, shape in zip(parts, shapes))
    cos, sin = random(table or dtype, 64, rotated).chunk(2, -1)
    positions = torch.randint(0, 64, (rows,), generator=generator).to(index)
    stored = random(dtype, 4 * kv_heads * block, dim + dim_v)
    stored = stored if scales[0] is None else stored.to(torch.float8_e4m3fn)
    memory = [stored.clone() for _ in range(2)]
    (keys, values), (right_keys, right_values) = (paged.caches(one, kv_heads, dim, block, layout) for one in memory)
    slots = torch.randperm(4 * block, generator=generator)[:tokens]
    slots[list(skip)] = -1
    before = projection.clone()
    turned, turned_key = rotary.rotary_embedding(query, key, cos, sin, positions, interleaved, False)
    cache.kv_cache_write(turned_key, value, right_keys, right_values, slots, *scales)
    launched.clear()
    found = rotary_cache.rotary_embedding_kv_cache_write(
        query, key, value, cos, sin, positions, keys, values, slots, interleaved, *scales
    )
    pairs = zip((*found, keys, values, projection), (turned, turned_key, right_keys, right_values, before))
    results.append([label, str(dtype), [same(one, other) for one, other in pairs], len(launched)])

for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
    compare("decode", dtype, 3, (8, 2), (128, 128, 128))
    compare("interleaved", dtype, 3, (4, 4), (64, 64, 64), interleaved=True)
    compare("half of the head", dtype, 3, (4, 1), (80, 32, 80), layout="token-major")
    compare("interleaved part", dtype, 3, (4, 2), (96, 64, 96), interleaved=True, layout="keys transposed")
    compare("20 of 24 elements", dtype, 3, (3, 1), (24, 20, 24), block=1, skip=(0,))
    compare("interleaved 20 of 24 elements", dtype, 2, (3, 1), (24, 20, 24), interleaved=True, block=1)
    compare("values of another size", dtype, 3, (6, 3), (48, 48, 40), layout="head-major", block=4)
    compare("skipped and padding", dtype, 5, (4, 2), (32, 32, 32), skip=(1, 3), padding=3)
    compare("nothing but skipped", dtype, 2, (2, 1), (64, 64, 64), skip=(0, 1))
    compare("no slots", dtype, 0, (2, 1), (64, 64, 64), padding=2)
    compare("64 heads of keys", dtype, 1, (64, 64), (64, 64, 64))
    compare("float32 table, int32 positions", dtype, 3, (4, 2), (64, 64, 64), table=torch.float32, index=torch.int32)
    compare("fp8 cache", dtype, 3, (4, 2), (64, 64, 64), scales=(0.03, 0.02))
    compare("fp8 cache, interleaved part", dtype, 3, (4, 2), (64, 32, 64), interleaved=True, scales=(0.5, 0.3))
print(json.dumps(results))
"""


def test_a_rotation_joined_with_the_write_is_the_two_bit_by_bit() -> None:
    """Queries, keys, both caches in all of their memory; what is read stays as it is."""
    found = json.loads(run(ROTATED).splitlines()[-1])
    assert len(found) == 4 * 14
    assert [case for case in found if case[2] != [True] * 5 or case[3] != 1] == []


LAYOUTS = r"""
import json, re, sys
sys.path.insert(0, sys.argv[1])
import kernel_cases
kernel_cases.triton.runtime.driver.set_active(kernel_cases.CompilingDriver())
found = {}
for case in kernel_cases.CASES:
    if case.name in sys.argv[2:]:
        (kernel,) = kernel_cases.compile_case(case)
        code = kernel.asm["ttgir"]
        layouts = dict(re.findall(r"(#\w+) = (#ttg[^\n]*)", code))
        used = re.findall(r"tt\.reduce.*?: \(tensor<([^>]*)>", code, re.S)
        found[case.name] = [[layouts[one.split(", ")[-1]] for one in used], kernel.metadata.shared]
print(json.dumps(found))
"""
NORM, BOTH, GATE = "norm of 4096 with a residual", "norm to fp8, 4096, with a residual", "gate to fp8, 14336"


def test_for_hopper_rows_lie_in_registers_as_the_norms_own_kernel_has_them(tmp_path: Path) -> None:
    """So sums are taken in the same order, and no result is shuffled through shared memory before it is written."""
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", LAYOUTS, str(BENCHMARKS), NORM, BOTH, GATE]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    (own,), _ = found[NORM]
    layouts, shared = found[BOTH]
    assert layouts == [own, own]
    assert shared <= 128
    assert found[GATE][1] <= 128


ACCESSES = r"""
import json, re, sys
sys.path.insert(0, sys.argv[1])
import kernel_cases
kernel_cases.triton.runtime.driver.set_active(kernel_cases.CompilingDriver())
(case,) = [case for case in kernel_cases.CASES if case.name == sys.argv[2]]
(kernel,) = kernel_cases.compile_case(case)
print(json.dumps(sorted(set(re.findall(r"(?:ld|st)\.global[\w.:]*?((?:\.v\d)?\.b\d+)\b", kernel.asm["ptx"])))))
"""


def test_for_hopper_a_rotation_and_the_write_move_16_bytes_at_once(tmp_path: Path) -> None:
    """All but the position and the slot of a token."""
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", ACCESSES, str(BENCHMARKS), "rotation and write, 128"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [".b64", ".v4.b32"]


def test_a_row_that_no_program_holds_is_declined_before_the_sum_is_written() -> None:
    x, residual = torch.ones(1, 33000), torch.ones(1, 33000)
    with pytest.raises(NotSupported, match="33000 elements with one scale"):
        quantized_rows.rms_norm_quantize(x, "int8", residual)
    assert residual.eq(1).all()

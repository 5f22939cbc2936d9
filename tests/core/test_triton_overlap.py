"""Kernels that come early wait before they read or write; products ask for their weights first. Compiled for sm_90."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from fl_dispatch.backends.triton.impl import overlap
from fl_dispatch.devices import CUDA
from fl_dispatch.settings import reset_settings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import json, re
from unittest import mock
import torch, triton
import kernel_cases
from kernel_cases import FP8, FP8_NAME, WIDE, _empty
from fl_dispatch.backends.triton.impl import activation, cache, joined, linear, mla, normalization, overlap

triton.runtime.driver.set_active(kernel_cases.CompilingDriver())
SEEN = re.compile(r"griddepcontrol[.]\\w+|prefetch[.]global|ld[.]global|st[.]global|cp[.]async[.]c[ag]|red[.]|atom[.]")
BF16 = torch.bfloat16


def cached(rows):
    slots = torch.empty(rows, dtype=torch.int64, device="meta")
    cache.kv_cache_write(*(_empty(rows, 8, 128) for _ in "kv"), *(_empty(64, 16, 8, 128) for _ in "kv"), slots)


CALLS = {
    "linear": lambda rows: linear.linear(_empty(rows, 4096), _empty(4096, 4096)),
    "scaled_linear": lambda rows: kernel_cases._scaled(rows, FP8),
    "weight_only_linear": lambda rows: kernel_cases._packed(rows, 4),
    "quantize": lambda rows: kernel_cases._quantized(rows, FP8_NAME),
    "rms_norm_quantize": lambda rows: kernel_cases._joined_norm(rows, True),
    "silu_and_mul_quantize": lambda rows: joined.silu_and_mul_quantize(_empty(rows, 8192), FP8_NAME),
    "kv_cache_write": cached,
    "paged_attention": lambda rows: kernel_cases._paged(128, 32, 8, rows, requests=1),
    "mla_decode": lambda rows: kernel_cases._latent(16, rows, 1),
    "rms_norm": lambda rows: normalization.rms_norm(_empty(rows, 4096), _empty(rows, 4096), _empty(4096)),
    "silu_and_mul": lambda rows: activation.silu_and_mul(_empty(rows, 8192)),
}
found = {}
for part in (overlap.NO, overlap.ANNOUNCES):
    told = [mock.patch.object(each, "announcing", lambda: part) for each in (overlap, mla, normalization, activation)]
    for patch in told:
        patch.start()
    for rows in (1, 2):
        for name, call in CALLS.items():
            compiled = []
            with kernel_cases.launches(False, compiled):
                call(rows)
            found[f"{name} {rows} {part}"] = [
                [bool(kernel.metadata.launch_pdl), SEEN.findall(kernel.asm["ptx"])] for kernel in compiled
            ]
    for patch in told:
        patch.stop()
print(json.dumps(found))
"""
PRODUCTS = ("linear", "scaled_linear", "weight_only_linear")
EARLY = (*PRODUCTS, "quantize", "rms_norm_quantize", "silu_and_mul_quantize", "kv_cache_write", "paged_attention")
TRACED = ("mla_decode", "rms_norm", "silu_and_mul")
ANNOUNCED, WAITED = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
Kernels = list[tuple[bool, list[str]]]


@pytest.fixture(scope="module")
def compiled() -> Mapping[str, Kernels]:
    """Operator, rows and part → of each kernel whether it is launched early, and what it does, in order."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: Mapping[str, Kernels] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", EARLY)
def test_for_one_row_a_kernel_comes_early_and_waits_before_it_reads_or_writes(
    name: str, compiled: Mapping[str, Kernels]
) -> None:
    for early, steps in compiled[f"{name} 1 {overlap.ANNOUNCES}"]:
        assert early
        hints = {"prefetch.global"} if name in PRODUCTS else set()
        before, after = steps[: steps.index(WAITED)], steps[steps.index(WAITED) + 1 :]
        assert before[0] == ANNOUNCED
        assert set(before[1:]) == hints
        assert {"ld.global", "st.global"} <= set(after)
        assert WAITED not in after


@pytest.mark.parametrize("name", [*EARLY, *TRACED])
def test_other_kernels_come_in_turn_and_at_most_say_that_the_next_may_come(
    name: str, compiled: Mapping[str, Kernels]
) -> None:
    found = compiled[f"{name} 2 {overlap.ANNOUNCES}"] + (
        compiled[f"{name} 1 {overlap.ANNOUNCES}"] if name in TRACED else []
    )
    for early, steps in found:
        assert not early
        assert WAITED not in steps
        assert ANNOUNCED not in steps[1:]
    if name not in PRODUCTS:
        assert found[-1][1][0] == ANNOUNCED


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", [*EARLY, *TRACED])
def test_without_it_no_kernel_knows_of_it(name: str, rows: int, compiled: Mapping[str, Kernels]) -> None:
    for early, steps in compiled[f"{name} {rows} {overlap.NO}"]:
        assert not early
        assert not {ANNOUNCED, WAITED, "prefetch.global"} & set(steps)


@pytest.mark.parametrize(
    ("capabilities", "features", "part"),
    [
        ([(9, 0)], "1", overlap.ANNOUNCES),
        ([(9, 0), (10, 0)], "1", overlap.ANNOUNCES),
        ([(9, 0), (8, 9)], "1", overlap.NO),
        ([(9, 0), None], "1", overlap.NO),
        ([(9, 0)], "0", overlap.NO),
    ],
    ids=["Hopper", "Hopper and later", "an older one beside it", "unknown", "features off"],
)
def test_kernels_take_part_where_every_gpu_has_it(
    capabilities: list[tuple[int, int] | None], features: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = dataclasses.replace(CUDA, device_count=lambda: len(capabilities))
    monkeypatch.setattr(overlap, "INTERPRETED", False)
    monkeypatch.setattr(overlap, "CUDA", gpus)
    monkeypatch.setattr(overlap, "detect_device", lambda: gpus)
    monkeypatch.setattr(overlap, "capability", lambda device: capabilities[device.index])
    monkeypatch.setenv("VLLM_FL_CHIP_FEATURES", features)
    reset_settings()
    assert overlap.announcing() == part
    assert overlap.part_of(1) == (overlap.EARLY if part else overlap.NO)
    assert overlap.part_of(2) == part


def test_no_kernel_takes_part_on_a_cpu() -> None:
    assert overlap.part_of(1) == overlap.NO


def test_the_compiler_of_pytorch_takes_the_part_as_a_constant() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return x + overlap.announcing()

    torch.compile(call, backend="eager", fullgraph=True)(torch.zeros(1))

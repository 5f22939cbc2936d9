"""oneDNN and MKL choose by rules: a busy machine changes neither choice nor result; instructions and threads may."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fl_dispatch.devices.cpu import cpu_name

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()), reason="oneDNN or MKL is missing"
)

PROGRAM = """
import hashlib, itertools, sys, torch
torch.set_num_threads(int(sys.argv[1]))
numbers = torch.Generator().manual_seed(0)
for rows, (inner, columns) in itertools.product((1, 7, 64), ((64, 64), (1000, 300), (1024, 512))):
    x, weight = torch.randn(rows, inner, generator=numbers), torch.randn(columns, inner, generator=numbers)
    products = {"mkl": x @ weight.T}
    for dtype in (torch.float32, torch.bfloat16)[: 1 + torch.ops.mkldnn._is_mkldnn_bf16_supported()]:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype))
        products[str(dtype)] = torch.ops.mkldnn._linear_pointwise(x.to(dtype), packed, None, "none", [], "")
    for name, product in products.items():
        print("result", name, rows, inner, hashlib.sha256(product.float().numpy().tobytes()).hexdigest(), flush=True)
"""


def chosen(threads: int = 1, **variables: str) -> tuple[list[str], Mapping[str, str]]:
    """What oneDNN ran for each product, one entry a run; and the bits of each product."""
    command = [sys.executable, "-c", PROGRAM, str(threads)]
    environment = {**os.environ, "ONEDNN_VERBOSE": "profile_exec", **variables}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    fields = [line.split(",") for line in ended.stdout.splitlines() if ",primitive,exec," in line]
    results = [line.split()[1:] for line in ended.stdout.splitlines() if line.startswith("result ")]
    ran = [" ".join(each[5:7] + each[-2:-1]) for each in fields if each[5] != "reorder"]
    return ran, {" ".join(names): bits for *names, bits in results}


@contextmanager
def busy_machine() -> Iterator[None]:
    """As many other processes as cores compute meanwhile."""
    program = [sys.executable, "-c", "while True: pass"]
    others: list[Any] = [subprocess.Popen(program) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.fixture(scope="module")
def quiet() -> tuple[list[str], Mapping[str, str]]:
    return chosen()


def test_a_busy_machine_changes_neither_choice_nor_result(quiet: tuple[list[str], Mapping[str, str]]) -> None:
    ran, bits = quiet
    of_onednn = [name for name in bits if not name.startswith("mkl")]
    assert len(ran) == len(of_onednn) >= 9, "each product ran once: nothing was tried"
    with busy_machine():
        assert chosen() == quiet


def test_fewer_instructions_and_more_threads_may_change_them(quiet: tuple[list[str], Mapping[str, str]]) -> None:
    ran, bits = quiet
    with ThreadPoolExecutor() as pool:
        older = pool.submit(chosen, ONEDNN_MAX_CPU_ISA="AVX2")
        threaded, bits_of_two = pool.submit(chosen, 2).result()
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert older.result()[0][0] != ran[0]
    assert threaded == ran
    if "Intel" in cpu_name():
        assert {name.split()[0] for name in bits if bits_of_two[name] != bits[name]} == {"mkl"}

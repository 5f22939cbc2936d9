"""Triton's kept kernels: a changed kernel, or another Triton, is compiled anew; a kept one of the same is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

@triton.jit
def helper(value):
    return value * {factor}

@triton.jit
def kernel(out):
    tl.store(out, helper(tl.load(out)) + {summand})

if {another}:
    triton.runtime.cache.__version__ = "9.9"
print(triton.compile(ASTSource(kernel, {{"out": "*fp32"}}, {{}}), target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""
PLANTED = "// planted"


def compiled(folder: Path, factor: int = 2, summand: int = 1, another: bool = False) -> str:
    """The code of a kernel, compiled or kept, in a process of its own."""
    file = folder / "kernels.py"
    file.write_text(SCRIPT.format(factor=factor, summand=summand, another=another))
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run([sys.executable, str(file)], check=True, capture_output=True, text=True, env=variables)
    return done.stdout


def test_a_stale_kernel_is_not_used(tmp_path: Path) -> None:
    compiled(tmp_path)
    (kept,) = (tmp_path / "cache").rglob("*.ptx")
    kept.write_text(PLANTED)
    assert compiled(tmp_path).strip() == PLANTED
    changes = [{"summand": 3}, {"factor": 5}, {"another": True}]
    assert [PLANTED in compiled(tmp_path, **change) for change in changes] == [False] * 3

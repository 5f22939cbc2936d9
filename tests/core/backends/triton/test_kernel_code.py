"""The comparison of compiled kernels says what is the same, and where the first difference is; Hopper's compile."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[4] / "benchmarks" / "kernel_code.py"
LOOP = ("LDSM R4, [R2]", "HGMMA.64x8x16.F32 R8, R4", "FMUL R5, R5, R6", "@P0 BRA 0x0", "EXIT")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_code", FILE)
    assert spec
    assert spec.loader
    module = sys.modules["kernel_code"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(tool: ModuleType, *texts: str) -> object:
    instructions = tuple(tool.Instruction(16 * number, text, text) for number, text in enumerate(texts))
    return tool.Code("case", "kernel", 32, 0, instructions)


def test_equal_encodings_are_the_same_code(tool: ModuleType) -> None:
    assert tool.difference(code(tool, *LOOP), code(tool, *LOOP)) == {"same": "code"}


def test_other_registers_leave_the_opcodes_the_same(tool: ModuleType) -> None:
    other = [text.replace("R5", "R7") for text in LOOP]
    found = tool.difference(code(tool, *LOOP), code(tool, *other))
    assert (found["same"], found["first_difference"]["instruction"]) == ("opcodes", 2)


def test_a_change_outside_the_loops_leaves_the_loops_the_same(tool: ModuleType) -> None:
    found = tool.difference(code(tool, *LOOP), code(tool, *LOOP, "NOP"))
    assert (found["same"], found["loops"], found["counts"]["all"]) == ("loops", ["code"], [5, 6])


def test_code_without_loops_has_no_loops_in_common(tool: ModuleType) -> None:
    assert tool.difference(code(tool, "MOV R1, R2"), code(tool, "NOP", "EXIT"))["same"] == "nothing"


def test_spills_and_tensor_cores_are_counted(tool: ModuleType) -> None:
    counts = code(tool, *LOOP, "STL [R1], R2", "@!P0 LDL R2, [R1]").counts
    assert (counts["tensor cores"], counts["spills"], counts["shared loads"]) == (1, 2, 1)


def compiled(case: str, folder: Path) -> list[dict[str, Any]]:
    """Return the kernels of a case of ``kernel_cases.py``."""
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, str(FILE.with_name("kernel_cases.py")), str(folder), "--case", case]
    subprocess.run(command, check=True, env=variables, capture_output=True)
    made: list[dict[str, Any]] = json.loads((folder / "kernels.json").read_text())["kernels"]
    assert made
    assert [kernel for kernel in made if "error" in kernel] == []
    return made


HOPPER = ("prefill 64", "latent decode 16", "latent listed", "index scores")
STATES = ("scan, ", "state update, ", "gated norm, ")


@pytest.mark.parametrize("case", [*HOPPER, *STATES])
def test_kernels_for_hopper_and_of_state_spaces_compile_with_the_triton_that_is_here(case: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    compiled(case, tmp_path)


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_four_bits_reach_the_matrix_units_from_registers(rows: int, tmp_path: Path) -> None:
    """Shared memory has words and rows of the steps that are loaded ahead, and rows in the units' order; no numbers."""
    pytest.importorskip("triton")
    from fl_dispatch.backends.triton.impl.products.weight_only_linear import WORD_TILES

    columns, _, stages, _ = next(tile for most, tile in WORD_TILES.items() if rows <= most)
    stored, given = columns * 128 // 2, rows * 128 * 2
    shared = {kernel["name"]: kernel["shared"] for kernel in compiled(f"4 bits, {rows} rows", tmp_path)}
    assert shared["_word_rows"] <= (stages - 1) * (stored + given) + given


def test_one_row_of_four_bits_reaches_the_matrix_units_from_registers(tmp_path: Path) -> None:
    """Shared memory has the row alone, never the numbers, which are 16 times as many."""
    pytest.importorskip("triton")
    from fl_dispatch.backends.triton.impl.products.weight_only_linear import SLICED_WARPS, SLICED_WORDS

    shared = {kernel["name"]: kernel["shared"] for kernel in compiled("4 bits, 1 row", tmp_path)}
    assert 0 < shared["_sliced_row"] <= SLICED_WARPS[1] * SLICED_WORDS * 8 * 2

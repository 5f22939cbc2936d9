"""The short way to launch a kernel passes what the public one passes, and never one kernel for another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import fl_dispatch.devices.launcher as module
from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported

STREAM = 17


class Kernel:
    """In the place of one that Triton compiles: keeps what it is launched with."""

    def __init__(self) -> None:
        self.public: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
        self.short: list[tuple[Any, ...]] = []
        self.hooked: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> SimpleNamespace:
            self.public.append((grid, arguments, options))
            return Compiled(self, f"kernel {len(self.public)}")

        return run


class Compiled:
    """In the place of what Triton compiles."""

    packed_metadata = "metadata"

    def __init__(self, kernel: Kernel, function: str) -> None:
        self.kernel, self.function = kernel, function

    def run(self, *arguments: Any) -> None:
        self.kernel.short.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.hooked.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(module, "INTERPRETED", True)  # tensors in host memory are let through
    monkeypatch.setattr(module, "prepares", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    return Kernel()


def test_from_the_second_launch_on_the_compiled_kernel_runs(kernel: Kernel) -> None:
    launcher, x, y = Launcher(kernel), torch.zeros(8), torch.zeros(8, dtype=torch.float16)
    launcher((2, 3, 1), (x, y), (5, True), sizes=(7, 9), warps=2, stages=5)
    assert kernel.public == [((2, 3, 1), (x, y, 7, 9, 5, True), {"num_warps": 2, "num_stages": 5})]
    assert kernel.short == []
    launcher((4, 1, 1), (x, y), (5, True), sizes=(8, 10), warps=2, stages=5)
    assert len(kernel.public) == 1
    nothing = (None, None, None)
    pointers = (x.data_ptr(), y.data_ptr())
    assert kernel.short == [(4, 1, 1, STREAM, "kernel 1", "metadata", *nothing, *pointers, 8, 10, 5, True)]


def test_a_repeated_launch_passes_what_it_is_given_and_the_first_ones_numbers(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    again = Launcher(kernel).first((2, 1, 1), (x, y), (5, True), sizes=(7,), warps=2)
    assert kernel.public == [((2, 1, 1), (x, y, 7, 5, True), {"num_warps": 2})]
    assert again is not None
    again((4, 1, 1), (32, 64, 9))
    assert kernel.short == [(4, 1, 1, STREAM, "kernel 1", "metadata", None, None, None, 32, 64, 9, 5, True)]
    monkeypatch.setattr(module, "_hooked", lambda: True)
    again((3, 1, 1), (16, 48, 8))
    assert kernel.hooked == [((3, 1, 1), (16, 48, 8, 5, True))]
    monkeypatch.setattr(module, "prepares", lambda: False)
    assert Launcher(kernel).first((2, 1, 1), (x,), (5,), sizes=(), warps=4) is None


ROW = torch.zeros(64)
FIRST: dict[str, Any] = {"tensors": (ROW[:32], ROW[32:]), "numbers": (5, True)}


@pytest.mark.parametrize(
    "other",
    [
        {"numbers": (6, True)},
        {"numbers": (5, False)},
        {"warps": 8},
        {"stages": 2},
        {"tensors": (ROW[:32].double(), ROW[32:])},
        {"tensors": (ROW[:32].half(), ROW[32:])},
        {"tensors": (ROW[1:33], ROW[32:])},
        {"tensors": (ROW[:32], ROW[33:])},
    ],
    ids=["a number", "a flag", "warps", "stages", "float64", "float16", "first misaligned", "second misaligned"],
)
def test_what_the_compiled_code_depends_on_is_compiled_anew(other: dict[str, Any], kernel: Kernel) -> None:
    launcher = Launcher(kernel)
    for given in (FIRST, {**FIRST, **other}, FIRST, {**FIRST, **other}):
        launcher((1, 1, 1), **given)
    assert len(kernel.public) == 2
    assert [given[4] for given in kernel.short] == ["kernel 1", "kernel 2"]


def test_sizes_and_where_aligned_tensors_lie_compile_nothing(kernel: Kernel) -> None:
    launcher = Launcher(kernel)
    for size, offset in ((1, 0), (2, 0), (16, 0), (16, 4), (1 << 30, 8)):
        launcher((size % 3 + 1, 1, 1), (ROW[offset:],), (5,), sizes=(size,))
    assert len(kernel.public) == 1


@pytest.mark.parametrize("way", ["another compiler", "a profiler's hook", "Dynamo"])
def test_where_the_short_way_is_not_known_to_hold_the_public_one_is_taken(
    way: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "prepares", lambda: way != "another compiler")
    monkeypatch.setattr(module, "_hooked", lambda: way == "a profiler's hook")
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: way == "Dynamo")
    launcher = Launcher(kernel)
    for _ in range(3):
        launcher((1, 1, 1), **FIRST)
    assert (len(kernel.public), kernel.short) == (3, [])


def test_tensors_in_host_memory_are_declined(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERPRETED", False)
    with pytest.raises(NotSupported, match="on the CPU"):
        Launcher(kernel)((1, 1, 1), **FIRST)
    assert kernel.public == []

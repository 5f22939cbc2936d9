"""Kernels that begin while the one before them ends: every one of them waits before it reads or writes anything."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from fl_dispatch.backends.triton import impl
from fl_dispatch.backends.triton.impl import launch, linear, normalization, overlap
from fl_dispatch.backends.triton.impl.launch import Launcher
from fl_dispatch.settings import reset_settings

MODULES = [importlib.import_module(f"{impl.__name__}.{found.name}") for found in pkgutil.iter_modules(impl.__path__)]
LAUNCHERS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, Launcher)
}
OVERLAPPING = [name for name, launcher in LAUNCHERS.items() if launcher.overlapping]


def test_there_are_such_kernels() -> None:
    assert {"linear._launch_row", "attention._launch_combine", "mla._launch_combine"} <= set(OVERLAPPING)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_the_first_thing_that_a_kernel_does_is_to_wait(name: str) -> None:
    source = textwrap.dedent(inspect.getsource(LAUNCHERS[name].kernel.fn))
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    statements = [line for line in function.body if not isinstance(getattr(line, "value", None), ast.Constant)]
    assert ast.unparse(statements[0]) == "await_previous(OVERLAPS)"
    assert function.args.args[-1].arg == "OVERLAPS"


@pytest.mark.parametrize("way", ["short", "public", "compiling"])
@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("overlapping", [True, False])
def test_a_kernel_waits_if_and_only_if_it_is_launched_so(
    way: str, supported: bool, overlapping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    ran: list[tuple[Any, ...]] = []
    compiled = SimpleNamespace(function=None, packed_metadata=None, run=lambda *arguments: ran.append(arguments))

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*arguments: Any, **options: Any) -> SimpleNamespace:
                launches.append((arguments, options))
                return compiled

            return run

    monkeypatch.setattr(launch, "overlaps", lambda device: supported)
    monkeypatch.setattr(launch, "INTERPRETED", True)  # tensors in host memory are let through
    monkeypatch.setattr(launch, "_short_way", lambda: way == "short")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: way == "compiling")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    launcher = Launcher(Kernel(), overlapping=overlapping)
    for _ in range(2):
        launcher((1, 1, 1), (torch.zeros(1),), (7,))
    waits = overlapping and supported and way != "compiling"
    for arguments, options in launches:
        assert arguments[1:] == ((7, waits) if overlapping else (7,))
        assert options.get("launch_pdl", False) is waits
    assert len(launches) == (1 if way == "short" else 2)
    for arguments in ran:
        assert arguments[-1] is (waits if overlapping else arguments[-1])
    assert len(ran) == (way == "short")


@pytest.mark.parametrize(
    ("capability", "setting", "device", "expected"),
    [(9, None, 0, True), (10, None, 0, True), (8, None, 0, False), (9, "0", 0, False), (9, None, -1, False)],
)
def test_where_kernels_are_launched_so(
    capability: int, setting: str | None, device: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (capability, 0))
    if setting is not None:
        monkeypatch.setenv("VLLM_FL_CHIP_FEATURES", setting)
        reset_settings()
    assert overlap.overlaps.__wrapped__(device) is expected


HALF, NUMBER = "*fp16", "i32"


def ptx(kernel: Any, *, constants: dict[str, Any], **types: str) -> list[str]:
    """The kernel's instructions for compute capability 9."""
    triton = importlib.import_module("triton")
    compiler, backends = (importlib.import_module(f"triton.{name}") for name in ("compiler", "backends.compiler"))
    names = kernel.arg_names
    source = compiler.ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = backends.GPUTarget("cuda", 90, 32)
    text: str = triton.compile(source, target=target, options={"launch_pdl": True}).asm["ptx"]
    return text[text.index(".entry") :].splitlines()


def test_the_compiled_kernel_touches_no_memory_before_it_waits() -> None:
    row = ptx(
        linear._row,
        **dict.fromkeys(("x", "weight", "bias", "out"), HALF),
        **dict.fromkeys(("inner", "columns", "WEIGHT_ROW"), NUMBER),
        constants={"HAS_BIAS": True, "EVEN": True, "BLOCK": 256, "COLUMNS": 4, "OVERLAPS": True},
    )
    flags = {"HAS_RESIDUAL": True, "HAS_WEIGHT": True, "GEMMA": False, "OVERLAPS": True}
    norm = ptx(
        normalization._norm,
        **dict.fromkeys(("x", "residual", "weight", "out", "total_out"), HALF),
        **dict.fromkeys(("rows", "OUTER_STRIDE", "INNER_STRIDE"), NUMBER),
        constants={"INNER": 1, "HIDDEN": 64, "EPSILON": 1e-6, "ROWS": 1, "BLOCK": 64, **flags},
    )
    for lines in (row, norm):
        (wait,) = (place for place, line in enumerate(lines) if "griddepcontrol.wait" in line)
        touched = [
            place for place, line in enumerate(lines) if re.search(r"\b(ld|st)\.global|cp\.async|atom|red\.", line)
        ]
        assert touched
        assert wait < min(touched)

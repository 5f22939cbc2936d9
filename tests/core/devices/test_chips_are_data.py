"""No source asks which chip it runs on by a name: what differs from chip to chip is a field of the device's spec."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fl_dispatch import devices

SOURCES = Path(devices.__file__).parents[2]
MAY_NAME_CHIPS = (
    *("fl_dispatch/devices", "fl_dispatch/backends/vendor", "fl_dispatch/native.py"),
    "fl_dispatch/ops/attention.py",
)
"""Places about one chip, or about main memory: native code finds its tensors there, and attention's reference takes
PyTorch's fused product there alone."""
NAMES = {text for spec in devices.BUILTIN_DEVICES for text in (spec.name, spec.torch_type)}
PROPERTIES = {f"is_{spec.torch_type}" for spec in devices.BUILTIN_DEVICES}


def naming(tree: ast.AST) -> list[int]:
    """Lines that compare something with the name or the type of a chip, or list such names to compare with."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            compared = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            compared = list(node.elts)
        elif isinstance(node, ast.Dict):
            compared = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        elif isinstance(node, ast.Attribute) and node.attr in PROPERTIES and id(node) not in called:
            found.append(node.lineno)  # a tensor's property; a host's platform has methods of these names
            continue
        else:
            continue
        found += [part.lineno for part in compared if isinstance(part, ast.Constant) and part.value in NAMES]
    return found


def test_no_source_but_devices_and_vendors_compares_with_the_name_of_a_chip() -> None:
    files = [
        path for path in SOURCES.rglob("*.py") if not path.relative_to(SOURCES).as_posix().startswith(MAY_NAME_CHIPS)
    ]
    found = [f"{path.relative_to(SOURCES)}:{line}" for path in files for line in naming(ast.parse(path.read_text()))]
    assert len(files) > 200
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        'device.type == "cpu"',
        '"npu" != device.torch_type',
        'device.type in ("cuda", "musa")',
        'SERVED = ["xpu"]',
        'RESOURCES = {"npu": "NPU"}',
        'str(device).startswith("mlu") or device.name == "ascend"',
        "tensor.is_cuda",
        'match device.type:\n    case "gcu": ...',
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    assert naming(ast.parse(line))


@pytest.mark.parametrize("line", ['torch.device("cpu")', "platform.is_cuda()", 'x = "cuda"', "device.accelerator"])
def test_a_line_that_only_makes_something_is_not(line: str) -> None:
    assert not naming(ast.parse(line))

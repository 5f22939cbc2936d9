"""Has Triton's compiler read the kernels that operators' inputs launch, for sm_90 and without a GPU; none is run.

Reading is the first step of a compilation and takes a fraction of its time. Prints the kernels that were read, those
that exist, and what was refused.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.compiler.compiler import ASTSource

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

from kernel_cases import h200

from fl_dispatch.backends.triton import impl, register_ops
from fl_dispatch.backends.triton.impl.products import weight_only_linear
from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops import OPERATORS, Sample
from fl_dispatch.ops.named import of_arguments


class Read(Exception):
    """The compiler has read a kernel."""


def samples(name: str) -> Iterable[Sample]:
    """The inputs of an operator in bfloat16; other types are constants of the same kernels."""
    make = OPERATORS[name].samples
    assert make is not None
    return make(torch.bfloat16, torch.device("cpu"), torch.Generator().manual_seed(0))


def existing() -> set[str]:
    """The names of all kernels that launchers have."""
    names = [found.name for found in pkgutil.walk_packages(impl.__path__, f"{impl.__name__}.")]
    values = [each for name in names for each in vars(importlib.import_module(name)).values()]
    return {each.kernel.__name__ for each in values if isinstance(each, Launcher)}


def main() -> None:
    read: dict[Any, str] = {}
    refused: list[tuple[str, str, str]] = []
    make = ASTSource.make_ir
    inputs = [""]

    def make_and_stop(*args: Any, **options: Any) -> None:
        make(*args, **options)
        raise Read

    def launch(
        launcher: Any, grid: Any, tensors: Any, numbers: Any, *, sizes: Any = (), warps: int = 4, stages: int = 3
    ) -> None:
        key = (id(launcher.kernel), tuple(each.dtype for each in tensors), numbers)
        if key in read:
            return
        read[key] = launcher.kernel.__name__
        try:
            launcher.kernel.warmup(*tensors, *sizes, *numbers, grid=grid, num_warps=warps, num_stages=stages)
        except Read:
            pass
        except Exception as error:
            refused.append((launcher.kernel.__name__, inputs[-1], str(error)))

    with (
        h200(False),
        mock.patch.multiple(weight_only_linear, SLICED_FROM=0, SLICED_WARPS=(2, 2)),  # inputs have small weights
        mock.patch.object(Launcher, "__call__", launch),
        mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),  # PyTorch reads what no kernel wrote
        mock.patch.object(ASTSource, "make_ir", make_and_stop),
    ):
        for row in register_ops.ROWS:
            module = importlib.import_module(f"{impl.__name__}.{row.module}")
            call = getattr(module, row.function)
            asked = getattr(module, row.supports) if row.supports else lambda: True
            supports = of_arguments(asked, OPERATORS[row.op_name].parameters)
            for sample in samples(row.op_name):
                if len(sample.args) > len(inspect.signature(call).parameters) or supports(*sample.args) is not True:
                    continue
                inputs.append(f"{row.op_name}, {sample.label}")
                with contextlib.suppress(NotSupported):
                    call(*sample.args)
    print(json.dumps([sorted(set(read.values())), sorted(existing()), refused]))


if __name__ == "__main__":
    main()

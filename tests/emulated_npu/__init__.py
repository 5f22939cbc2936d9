"""An Ascend NPU on a CPU: the genuine ``torch_npu`` wheel over an emulated runtime, with emulated kernels.

``runtime.c`` is the runtime, ``aten.py`` runs PyTorch's operators, ``kernels`` those of ``torch_npu``, from its
documentation, and ``collectives.py`` is the stand-in for HCCL. ``install.py`` puts it into an environment, where
``import torch`` calls ``activate`` in every process. docs/ascend.md says what it can show and what it cannot.

Environment variables, read in each process:

- ``EMU_NPUS``, ``EMU_NPU_BYTES``: devices and the memory of each (``runtime.c``);
- ``EMU_NPU_WRONG``: names of ``npu::`` operators, separated by commas, whose kernels shall be wrong;
- ``EMU_NPU_WAIVE``: documented rules, separated by commas, that are not enforced (``kernels.WAIVABLE``).
"""

from __future__ import annotations

import os
import sys

from .kernels import Refused, calls, reset_calls

__all__ = ["Refused", "activate", "calls", "reset_calls"]

_active = False


def activate() -> None:
    """Import ``torch_npu`` and emulate what it calls; the entry point of the group ``torch.backends``."""
    global _active
    if _active:
        return
    _active = True
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")  # else kernels are launched by a thread of their own
    import torch_npu  # noqa: F401

    from . import aten, collectives, kernels

    served = aten.install()
    collectives.install()
    names = kernels.install()
    changed = "".join(
        f", {variable}={os.environ[variable]}"
        for variable in ("EMU_NPU_WRONG", "EMU_NPU_WAIVE")
        if os.environ.get(variable)
    )
    print(
        f"INFO emulated_npu: npu devices of this process are emulated on the CPU "
        f"({served} ATen and {len(names)} npu operators{changed})",
        file=sys.stderr,
    )

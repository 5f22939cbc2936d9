"""The hook that ``import torch`` calls in every process of an environment with the emulated NPU."""

from __future__ import annotations

import os
import sys

_active = False


def activate() -> None:
    """Import ``torch_npu`` and emulate what it calls; the entry point of the group ``torch.backends``."""
    global _active
    if _active:
        return
    _active = True
    os.environ.setdefault("FL_EMULATED_CHIP", "torch_npu on a CPU, kernels from its documentation")  # what fl demo says
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")  # else kernels are launched by a thread of their own
    import torch_npu  # noqa: F401

    from . import aten, collectives, graphs, kernels, launches

    served = aten.install(launches.launch)
    graphs.install()
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

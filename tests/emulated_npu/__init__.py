"""An Ascend NPU on a CPU: the genuine ``torch_npu`` wheel over an emulated runtime, with emulated kernels.

``runtime.c`` is the runtime, ``aten.py`` runs PyTorch's operators, ``kernels`` those of ``torch_npu``, from its
documentation, and ``collectives.py`` is the stand-in for HCCL; ``launches.py`` and ``graphs.py`` count waits and record
graphs. ``install.py`` puts it into an environment, where
``import torch`` calls ``startup.activate`` in every process. docs/evidence/emulated_npu.md says what it can show.

Environment variables, read in each process:

- ``EMU_NPUS``, ``EMU_NPU_BYTES``: devices and the memory of each (``runtime.c``);
- ``EMU_NPU_WRONG``: names of ``npu::`` operators, separated by commas, whose kernels shall be wrong;
- ``EMU_NPU_WAIVE``: documented rules, separated by commas, that are not enforced (``kernels.WAIVABLE``).
"""

from __future__ import annotations

import torch as _torch  # noqa: F401  before all else: its import activates the emulation

from .graphs import graph_counts
from .kernels import Refused, calls, reset_calls
from .launches import reset_waits, waits

__all__ = ["Refused", "calls", "graph_counts", "reset_calls", "reset_waits", "waits"]

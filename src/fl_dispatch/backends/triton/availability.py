"""Whether Triton can run here. Imports no Triton and creates no device context."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: ``TRITON_INTERPRET=1``."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def why_unavailable() -> str:
    """In words why the kernels cannot run here, or an empty string."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not interpreted() and torch.cuda.device_count() == 0:
        return "no GPU that PyTorch knows as 'cuda' (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
    return ""

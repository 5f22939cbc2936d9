"""PyTorch's threads while vLLM serves: a CPU's model computes on them, so vLLM must not change their number.

vLLM sets one thread if ``OMP_NUM_THREADS`` is missing, and warns if it is set to more: rules for a process that
launches a device's kernels. vLLM's own CPU platform has a worker without these rules.
"""

from __future__ import annotations

from types import ModuleType

NAME = "set_torch_threads_for_runtime"


def leave(module: ModuleType) -> None:
    """Stop a module of vLLM from changing the number of PyTorch's threads. Idempotent."""
    setattr(module, NAME, _leave)


def _leave() -> None:
    pass

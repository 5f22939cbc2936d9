"""PyTorch's threads while vLLM serves: on a CPU the model computes on them, so vLLM leaves their number alone.

vLLM sets one thread where ``OMP_NUM_THREADS`` is missing, and warns of more where it is set: rules for a process that
launches kernels of a device. Its own CPU platform has a worker without them.
"""

from __future__ import annotations

from types import ModuleType

NAME = "set_torch_threads_for_runtime"


def leave(module: ModuleType) -> None:
    """Have a module of vLLM leave the number of PyTorch's threads as it is. Idempotent."""
    setattr(module, NAME, _leave)


def _leave() -> None:
    pass

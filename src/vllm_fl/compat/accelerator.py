"""``torch.accelerator``, which vLLM's shared code calls, on a machine without an accelerator."""

from __future__ import annotations

from typing import Any

import torch


def _no_accelerator(*args: Any, **kwargs: Any) -> None:
    return None


def silence_accelerator() -> None:
    """Make the ``torch.accelerator`` calls of vLLM's shared code do nothing if PyTorch has no accelerator."""
    if not torch.accelerator.is_available():
        for name in ("empty_cache", "empty_host_cache", "synchronize"):
            setattr(torch.accelerator, name, _no_accelerator)

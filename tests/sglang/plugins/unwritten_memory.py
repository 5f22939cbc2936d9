"""Memory that nobody has written holds NaN in SGLang's scheduler, so whoever reads it gets wrong tokens each time."""

from __future__ import annotations

import torch

from fl_dispatch import OpRegistry


def register_builtins(registry: OpRegistry) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)

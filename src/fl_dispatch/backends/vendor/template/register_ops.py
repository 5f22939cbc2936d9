"""Registers the backend's operators.

A package outside this repository names :func:`register_builtins` in the entry point group ``vllm_fl.plugin``.
"""

from __future__ import annotations

from fl_dispatch.backends.base import Registry
from fl_dispatch.types import BackendImplKind, BackendPriority

from .impl.normalization import supports_rms_norm
from .template import TemplateBackend


def register_builtins(registry: Registry) -> None:
    """Register ``vendor.template`` for every operator that the backend has a method for."""
    registry.register_many(
        TemplateBackend().implementations(
            BackendImplKind.VENDOR,
            "vendor.template",
            BackendPriority.VENDOR,
            supports={"rms_norm": supports_rms_norm},  # only for kernels that do not take everything
            device_types=None,  # of a chip: ("npu",), the PyTorch types of tensors that its kernels take
            opaque=None,  # True where torch.compile cannot trace into the kernels
        )
    )

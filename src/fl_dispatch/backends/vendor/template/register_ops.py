"""Register the backend's operators.

A package outside this repository names :func:`register_builtins` in the entry point group ``vllm_fl.plugin``.
"""

from __future__ import annotations

from fl_dispatch.backends.base import Registry
from fl_dispatch.types import BackendImplKind, BackendPriority

from .impl.normalization import supports_rms_norm
from .template import TemplateBackend


def register_builtins(registry: Registry) -> None:
    """Register ``vendor.template`` for every operator with a method of the backend."""
    registry.register_many(
        TemplateBackend().implementations(
            BackendImplKind.VENDOR,
            "vendor.template",
            BackendPriority.VENDOR,
            supports={"rms_norm": supports_rms_norm},  # only for kernels that do not take all arguments
            device_types=None,  # for a chip: ("npu",), the PyTorch device types that its kernels take
            opaque=None,  # True if torch.compile cannot trace into the kernels
        )
    )

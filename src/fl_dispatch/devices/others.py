"""Chips of other vendors, one row each. All are untested: detection and names come from documentation and source.

Some have their own device type in PyTorch; others are called ``cuda`` because the vendor's PyTorch imitates NVIDIA's.
Files of their drivers and management programs distinguish the latter; every row names these files.
``torch.version.cuda`` does not help, because most of these builds have one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .cuda import DRIVER_FILES, has_file
from .cuda import count as cuda_count
from .spec import TRITON, DeviceSpec
from .torch_module import counter, functions, hook
from .unowned import over_its_storage

ROOT = Path("/")
"""The root below which signs of drivers are searched."""


def _signed(*files: str, toolkit: str | None = None, tool: str | None = None) -> Callable[[], bool]:
    """Return a check whether PyTorch sees ``cuda`` devices and the machine has a sign of the chip.

    A driver's file is a sign. A toolkit's folder and a program are signs too, unless NVIDIA's driver has files there,
    because they may outlast the chip.
    """

    def detect() -> bool:
        if cuda_count() == 0:
            return False
        if has_file(*files, root=ROOT):
            return True
        if has_file(*DRIVER_FILES, root=ROOT):
            return False
        left = (toolkit is not None and has_file(toolkit, root=ROOT)) or (tool is not None and shutil.which(tool))
        return bool(left)

    return detect


def _like_cuda(name: str, detect: Callable[[], bool], **changes: Any) -> DeviceSpec:
    """Return a chip that the vendor's PyTorch calls ``cuda``, with CUDA's names for everything else."""
    defaults: dict[str, Any] = {
        "vendor": name,
        "torch_type": "cuda",
        "dispatch_key": "CUDA",
        "dist_backend": "nccl",
        "platform_config": name,
        "visible_devices": "CUDA_VISIBLE_DEVICES",
        "priority": 30,
        "pin_memory": True,
        "inductor": TRITON,
        "graphs": True,
        "unowned_view": over_its_storage,
        "device_count": cuda_count,
        "device_name": hook("cuda", "get_device_name"),
        "memory": hook("cuda", "mem_get_info"),
        **functions("cuda"),
    }
    return DeviceSpec(name=name, detect=detect, **{**defaults, **changes})


def _with_own_type(name: str, torch_type: str, extension: str | None, dist_backend: str, **changes: Any) -> DeviceSpec:
    """Return a chip with its own type in PyTorch: it is present if PyTorch counts one."""
    count = counter(torch_type, extension)
    defaults: dict[str, Any] = {
        "vendor": name,
        "dispatch_key": "PrivateUse1",
        "platform_config": name,
        "priority": 20,
        "pin_memory": True,
        "detect": lambda: count() > 0,
        "device_count": count,
        "device_name": hook(torch_type, "get_device_name"),
        "memory": hook(torch_type, "mem_get_info"),
        **functions(torch_type),
    }
    given = {**defaults, **changes}
    return DeviceSpec(name=name, torch_type=torch_type, extension=extension, dist_backend=dist_backend, **given)


def _is_hygon() -> bool:
    """Whether it is a HIP build on a machine with the DCU's driver; AMD's driver is older and has a similar name."""
    return torch.version.hip is not None and _signed("sys/module/hydcu", toolkit="opt/dtk*", tool="hy-smi")()


def _is_amd() -> bool:
    """Whether it is a HIP build on a machine without the DCU's driver."""
    return torch.version.hip is not None and cuda_count() > 0 and not _is_hygon()


METAX = _like_cuda("metax", _signed("dev/mxcd", toolkit="opt/maca", tool="mx-smi"))
ILUVATAR = _like_cuda("iluvatar", _signed("dev/iluvatar*", toolkit="usr/local/corex", tool="ixsmi"))
KUNLUNXIN = _like_cuda(
    "kunlunxin",
    _signed("dev/xpuctrl", "dev/xpu[0-9]*", tool="xpu_smi"),
    visible_devices="XPU_VISIBLE_DEVICES",
    inductor=None,
    graphs=False,
)
THEAD = _like_cuda("thead", _signed("dev/alixpu*", tool="ppu-smi"))
HYGON = _like_cuda("hygon", _is_hygon, visible_devices="HIP_VISIBLE_DEVICES", float64=True)
AMD = _like_cuda("amd", _is_amd, visible_devices="HIP_VISIBLE_DEVICES", float64=True)

MTHREADS = _with_own_type(
    "mthreads", "musa", "torch_musa", "mccl", visible_devices="MUSA_VISIBLE_DEVICES", graph_class="MUSAGraph"
)
CAMBRICON = _with_own_type(
    "cambricon", "mlu", "torch_mlu", "cncl", visible_devices="MLU_VISIBLE_DEVICES", graph_class="MLUGraph"
)
ENFLAME = _with_own_type("enflame", "gcu", "torch_gcu", "eccl", visible_devices="TOPS_VISIBLE_DEVICES")
INTEL = _with_own_type(
    "intel", "xpu", None, "xccl", dispatch_key="XPU", visible_devices="ZE_AFFINITY_MASK", inductor=TRITON
)

OTHERS = (METAX, ILUVATAR, KUNLUNXIN, THEAD, HYGON, AMD, MTHREADS, CAMBRICON, ENFLAME, INTEL)

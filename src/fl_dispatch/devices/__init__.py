"""A chip besides its kernels, from which both hosts' plugins derive their platform.

``spec`` describes the differences between chips; ``cpu``, ``cuda``, ``ascend`` and ``others`` are the chips of this
package; ``detect`` finds a machine's chip among them and those of installed packages. Import and detection create no
device context, because hosts fork after detection.
"""

from __future__ import annotations

from .ascend import ASCEND
from .cpu import CPU
from .cuda import CUDA
from .detect import BUILTIN_DEVICES, DEVICE_GROUP, detect_device, device_of, device_specs, load_failures
from .others import OTHERS
from .spec import CPP, TRITON, DeviceSpec

__all__ = [
    "ASCEND",
    "BUILTIN_DEVICES",
    "CPP",
    "CPU",
    "CUDA",
    "DEVICE_GROUP",
    "OTHERS",
    "TRITON",
    "DeviceSpec",
    "detect_device",
    "device_of",
    "device_specs",
    "load_failures",
]

"""A chip besides its kernels. Both hosts' plugins derive their platform from it.

``spec`` describes the differences between chips; ``cpu``, ``cuda``, ``ascend`` and ``others`` are the chips of this
package; ``detect`` finds the chip of a machine, among them and those of installed packages. No device context is
created at import or in detection, because hosts fork after they have detected.
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

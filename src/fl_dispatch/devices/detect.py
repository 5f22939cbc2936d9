"""Known devices, the device of this machine, and the device of a tensor.

A package adds its device through the entry point group ``vllm_fl.device``; the target is a ``DeviceSpec``, or a
function without parameters that returns one.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

import torch

from ..api import why_refused
from ..errors import DeviceError
from ..logger_manager import get_logger
from .ascend import ASCEND
from .cpu import CPU
from .cuda import CUDA
from .others import OTHERS
from .spec import DeviceSpec
from .torch_module import count

logger = get_logger(__name__)

DEVICE_GROUP = "vllm_fl.device"
BUILTIN_DEVICES = (*OTHERS, ASCEND, CUDA, CPU)


def _load(entry: EntryPoint) -> DeviceSpec | str:
    """Return the spec that a package's entry point names, or why there is none.

    Raises:
        DeviceError: the package has a spec with a wrong field.
    """
    if why := why_refused(entry):
        return f"device entry point '{entry.name}' ({entry.value}) is not used: {why}"
    try:
        target = entry.load()
        spec = target if isinstance(target, DeviceSpec) else target()
        if not isinstance(spec, DeviceSpec):
            raise TypeError(f"it gave {type(spec).__name__}, not a DeviceSpec")
    except DeviceError as error:
        raise DeviceError(error.device, f"{error.problem} (entry point '{entry.name}': {entry.value})") from error
    except Exception as error:  # another package's code: reported, and the others still count
        return f"device entry point '{entry.name}' ({entry.value}) did not load: {type(error).__name__}: {error}"
    return spec


@cache
def _packages() -> tuple[tuple[DeviceSpec, ...], tuple[str, ...]]:
    """Return the packages' devices, and what did not load; a WARNING, so that one package does not stop the others."""
    loaded = [_load(entry) for entry in entry_points(group=DEVICE_GROUP)]
    failures = tuple(found for found in loaded if isinstance(found, str))
    for failure in failures:
        logger.warning("%s", failure)
    return tuple(found for found in loaded if isinstance(found, DeviceSpec)), failures


def load_failures() -> tuple[str, ...]:
    """Return why devices of installed packages are missing, one sentence each."""
    return _packages()[1]


@cache
def device_specs() -> tuple[DeviceSpec, ...]:
    """Return every known device in the order of detection: packages' devices, then CUDA-like chips, …, CUDA, CPU.

    Raises:
        DeviceError: a package's spec is wrong.
    """
    return tuple(sorted((*_packages()[0], *BUILTIN_DEVICES), key=lambda spec: -spec.priority))


@cache
def detect_device() -> DeviceSpec:
    """Return the device of this machine: the first of :func:`device_specs` that is present. The CPU always is.

    ``VLLM_FL_PLATFORM`` has no effect here: it selects the YAML file of defaults, not the device.

    Raises:
        DeviceError: a package's spec is wrong, or the spec of this machine's device is.
    """
    for spec in device_specs():
        try:
            found = spec.detect()
        except Exception as error:  # another package's code: reported, and the others still count
            logger.warning("Detection of device '%s' failed: %s: %s", spec.name, type(error).__name__, error)
            continue
        if found:
            spec.check()
            if not spec.accelerator:
                _warn_of_unknown()
            return spec
    return CPU


def _warn_of_unknown() -> None:
    """Log one WARNING if PyTorch sees an accelerator without a spec, because otherwise the CPU would serve silently."""
    own = torch._C._get_privateuse1_backend_name()
    for torch_type in ("cuda", own):
        try:
            there = count(torch_type)
        except (RuntimeError, AttributeError, TypeError):  # a module that is not a device's
            continue
        if there:
            logger.warning(
                "PyTorch sees %d devices of type '%s', but no known chip's driver is on this machine, so the CPU "
                "runs; a package can bring the chip's DeviceSpec (docs/guide/chips.md)",
                there,
                torch_type,
            )


@cache
def device_of(torch_type: str) -> DeviceSpec:
    """Return the device of tensors with a PyTorch device type: this machine's, or another one of that type.

    Tensors without data (``meta``) count as tensors of this machine's device.

    Raises:
        DeviceError: no device has this type.
    """
    own = detect_device()
    if torch_type == "meta":
        return own
    found = next((spec for spec in (own, CPU, CUDA, *device_specs()) if spec.torch_type == torch_type), None)
    if found is None:
        raise DeviceError(
            torch_type, "no known device has this PyTorch type; a package can bring one (docs/guide/chips.md)"
        )
    return found

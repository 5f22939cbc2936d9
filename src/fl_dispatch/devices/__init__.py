"""What a chip is besides its kernels: one :class:`DeviceSpec` for each kind of device.

Both host plugins derive their platform class from the spec. A vendor package adds its own through the entry point
group ``vllm_fl.device``; its target is a ``DeviceSpec``, or a function without parameters that returns one. No device
context is created at import or in detection, because hosts fork after they have detected.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch

from ..logger_manager import get_logger
from . import nvml

logger = get_logger(__name__)

DEVICE_GROUP = "vllm_fl.device"


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One kind of device. Callables that take an index mean the device with that index.

    Args:
        name: its name, such as ``ascend``.
        vendor: the vendor whose implementations it runs, or ``None`` for a device that belongs to nobody.
        torch_type: its PyTorch device type, such as ``npu``.
        dispatch_key: PyTorch's dispatch key of its tensors.
        dist_backend: the ``torch.distributed`` backend of its collectives.
        platform_config: the YAML file with its defaults: a path for one that is shipped with the spec, or the name of
            one of this package without the suffix, or ``None``.
        visible_devices: the environment variable that says which devices a process may use, or ``None``.
        priority: among several that are detected the highest wins; packages should stay above 100.
        pin_memory: whether pinned host memory helps.
        graphs: whether it can capture and replay graphs.
        detect: whether this machine has one. Must not create a device context.
        device_count: how many there are. Must not create a device context.
        device_name: the name a person knows it by, such as ``NVIDIA H200``. Must not create a device context.
        memory: bytes available now, and bytes in total. Must not create a device context.
        capability: compute capability as (major, minor), or ``None`` where there is no such thing. Must not create a
            device context.
        compute_units: how many processors it has, each of which runs programs of its own. May create a device context.
        manual_seed: seeds the random generators of all devices.
        synchronize: waits for everything that was launched.
        empty_cache: gives cached memory back.
        is_capturing: whether a graph is being captured in this thread's current stream. Must not create a device
            context. By default ``torch.<torch_type>.is_current_stream_capturing`` is asked; a device whose PyTorch
            module has no such function never captures.
    """

    name: str
    torch_type: str
    dispatch_key: str
    dist_backend: str
    detect: Callable[[], bool]
    device_count: Callable[[], int]
    device_name: Callable[[int], str]
    memory: Callable[[int], tuple[int, int]]
    vendor: str | None = None
    platform_config: str | Path | None = None
    visible_devices: str | None = None
    priority: int = 100
    pin_memory: bool = False
    graphs: bool = False
    capability: Callable[[int], tuple[int, int] | None] = _nothing
    compute_units: Callable[[int], int] = lambda index: 1
    manual_seed: Callable[[int], None] = _nothing
    synchronize: Callable[[], None] = _nothing
    empty_cache: Callable[[], None] = _nothing
    is_capturing: Callable[[], bool] | None = None

    def captures(self) -> bool:
        """Whether a graph is being captured in this thread's current stream: what :attr:`is_capturing` says."""
        if self.is_capturing is not None:
            return self.is_capturing()
        module = getattr(torch, self.torch_type, None)
        ask, initialized = (getattr(module, name, None) for name in ("is_current_stream_capturing", "is_initialized"))
        if ask is None or (initialized is not None and not initialized()):
            return False
        return bool(ask())


# -- CPU --------------------------------------------------------------------------------------------------------------

_CGROUP = Path("/sys/fs/cgroup")


def _read_bytes(path: Path) -> int | None:
    """The number in a one-number file, or ``None`` where it is missing or says ``max``."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest.split()
    }


def cpu_memory(index: int = 0) -> tuple[int, int]:
    """Bytes of main memory available to this process now, and in total; the container's limit counts."""
    info = _meminfo()
    total = info.get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = info.get("MemAvailable", total)
    limit, used = _read_bytes(_CGROUP / "memory.max"), _read_bytes(_CGROUP / "memory.current")
    if limit is not None and limit < total:
        total, available = limit, min(available, limit - (used or 0))
    return max(available, 0), total


def cpu_name(index: int = 0) -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _seed_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


CPU = DeviceSpec(
    name="cpu",
    torch_type="cpu",
    dispatch_key="CPU",
    dist_backend="gloo",
    platform_config="cpu",
    priority=0,
    detect=lambda: True,
    device_count=lambda: 1,
    device_name=cpu_name,
    memory=cpu_memory,
    compute_units=lambda index: torch.get_num_threads(),
    manual_seed=_seed_cpu,
)


# -- accelerators with a torch module of their own --------------------------------------------------------------------


def _hook(torch_type: str, name: str) -> Callable[..., Any]:
    """The function ``torch.<torch_type>.<name>``, looked up when it is called."""

    def call(*args: Any) -> Any:
        return getattr(getattr(torch, torch_type), name)(*args)

    return call


def _count(torch_type: str) -> int:
    module = getattr(torch, torch_type, None)  # torch.npu exists once torch_npu is installed
    return int(module.device_count()) if module is not None else 0


def _gpu(index: int) -> nvml.Gpu:
    """An NVIDIA GPU; through a CUDA context where its management library is missing, as in some containers."""
    try:
        return nvml.query(index)
    except nvml.NvmlError as error:
        logger.debug("GPU %d is asked through CUDA: %s", index, error)
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        return nvml.Gpu(name, *torch.cuda.mem_get_info(index), capability)


CUDA = DeviceSpec(
    name="cuda",
    vendor="cuda",
    torch_type="cuda",
    dispatch_key="CUDA",
    dist_backend="nccl",
    platform_config="cuda",
    visible_devices="CUDA_VISIBLE_DEVICES",
    priority=10,
    pin_memory=True,
    graphs=True,
    detect=lambda: torch.version.cuda is not None and _count("cuda") > 0,  # a ROCm build has torch.cuda, too
    device_count=lambda: _count("cuda"),
    device_name=lambda index: _gpu(index).name,
    memory=lambda index: (_gpu(index).available, _gpu(index).total),
    capability=lambda index: _gpu(index).capability,
    compute_units=lambda index: int(torch.cuda.get_device_properties(index).multi_processor_count),
    manual_seed=_hook("cuda", "manual_seed_all"),
    synchronize=_hook("cuda", "synchronize"),
    empty_cache=_hook("cuda", "empty_cache"),
)

# The static fields and the detection only: we have not run on this chip yet.
ASCEND = DeviceSpec(
    name="ascend",
    vendor="ascend",
    torch_type="npu",
    dispatch_key="PrivateUse1",
    dist_backend="hccl",
    platform_config="ascend",
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    priority=20,
    pin_memory=True,
    graphs=True,
    detect=lambda: _count("npu") > 0,
    device_count=lambda: _count("npu"),
    device_name=_hook("npu", "get_device_name"),
    memory=_hook("npu", "mem_get_info"),
    manual_seed=_hook("npu", "manual_seed_all"),
    synchronize=_hook("npu", "synchronize"),
    empty_cache=_hook("npu", "empty_cache"),
)

BUILTIN_DEVICES = (ASCEND, CUDA, CPU)


# -- which of them this machine has -----------------------------------------------------------------------------------


def _load(entry: EntryPoint) -> DeviceSpec | None:
    """The spec that a package's entry point names. One that was only found must not stop the others: WARNING."""
    try:
        target = entry.load()
        spec = target if isinstance(target, DeviceSpec) else target()
        if not isinstance(spec, DeviceSpec):
            raise TypeError(f"it gave {type(spec).__name__}, not a DeviceSpec")
    except Exception as error:  # somebody else's code: reported, and the others still count
        logger.warning(
            "Device entry point '%s' (%s) did not load: %s: %s", entry.name, entry.value, type(error).__name__, error
        )
        return None
    return spec


@cache
def device_specs() -> tuple[DeviceSpec, ...]:
    """Every known device, in the order in which they are asked: packages' own, then Ascend, CUDA, CPU."""
    found = [spec for entry in entry_points(group=DEVICE_GROUP) if (spec := _load(entry)) is not None]
    return tuple(sorted((*found, *BUILTIN_DEVICES), key=lambda spec: -spec.priority))


@cache
def detect_device() -> DeviceSpec:
    """The device of this machine: the first in :func:`device_specs` that is there. The CPU always is.

    ``VLLM_FL_PLATFORM`` does not enter: it says which YAML file holds the defaults, not which device runs.
    """
    for spec in device_specs():
        try:
            if spec.detect():
                return spec
        except Exception as error:  # somebody else's code: reported, and the others still count
            logger.warning("Detection of device '%s' failed: %s: %s", spec.name, type(error).__name__, error)
    return CPU

"""The CPU: main memory, and the processor's cores."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from .spec import CPP, DeviceSpec

_CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = 228 << 10
"""A program's shared memory in Triton's interpreter: that of the largest GPU for which the kernels are written."""


def _read_bytes(path: Path) -> int | None:
    """Return the number in a one-number file; ``None`` if the file is missing or says ``max``."""
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
    """Return the bytes of main memory available to this process now, and in total, within the container's limit."""
    info = _meminfo()
    total = info.get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = info.get("MemAvailable", total)
    limit, used = _read_bytes(_CGROUP / "memory.max"), _read_bytes(_CGROUP / "memory.current")
    if limit is not None and limit < total:
        total, available = limit, min(available, limit - (used or 0))
    return max(available, 0), total


def cpu_name(index: int = 0) -> str:
    """Return the processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def sglang_attention(machine: str) -> str:
    """Return the attention backend that SGLang chooses by default on a processor of this architecture."""
    return "torch_native" if machine.lower() in ("aarch64", "arm64") else "intel_amx"


def _seed_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


CPU = DeviceSpec(
    name="cpu",
    torch_type="cpu",
    dispatch_key="CPU",
    dist_backend="gloo",
    platform_config="cpu",
    priority=0,
    verified={"vLLM": "all tests run on it", "SGLang": "all tests run on it"},
    model_runners=("v1", "v2"),
    host_attention={"SGLang": sglang_attention(platform.machine())},
    accelerator=False,
    forks=True,
    float64=True,
    float8=True,
    quantized=("vLLM", "SGLang"),
    quantized_latent=("vLLM", "SGLang"),
    flagcx_stream=lambda: None,
    triton=False,
    inductor=CPP,
    detect=lambda: True,
    device_count=lambda: 1,
    device_name=cpu_name,
    memory=cpu_memory,
    compute_units=lambda index: torch.get_num_threads(),
    shared_memory=lambda index: SHARED_MEMORY,
    manual_seed=_seed_cpu,
)

"""The description of a chip besides its kernels: :class:`DeviceSpec`, one for each kind of device.

Every difference between chips is a field or a function here, so that neither the core nor a host's plugin compares a
device's type with a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ..errors import DeviceError

CPP = "cpp"
"""Inductor writes C++ for the device."""
TRITON = "triton"
"""Inductor writes Triton for the device."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

STREAM_NAMES = ("Stream", "Event", "default_stream", "current_stream", "stream", "set_stream")
GRAPH_NAMES = ("CUDAGraph", "graph", "graph_pool_handle")


def _nothing(*_: Any) -> None:
    return None


def _unknown(index: int) -> int:
    return 0


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceSpec:
    """One kind of device. Callables that take an index mean the device with that index.

    The functions ``detect``, ``device_count``, ``driver``, ``capability`` and ``is_capturing`` must not create a device
    context, because hosts ask them in a parent process and fork afterwards. Mappings are from the name of a host
    (``vLLM``, ``SGLang``).

    Args:
        name: its name, such as ``ascend``.
        vendor: the vendor of the implementations for this device, or ``None`` for a device without a vendor.
        torch_type: its PyTorch device type, such as ``npu``.
        extension: the package that adds this type to PyTorch; imported before detection, if it is installed.
        dispatch_key: PyTorch's dispatch key of its tensors.
        platform_config: the YAML file with its defaults: a path if it is shipped with the spec, or the name of one in
            this package without the suffix, or ``None``.
        visible_devices: the environment variable that says which devices a process may use, or ``None``.
        ray_resource: Ray's name of the device for placing workers.
        priority: among several detected devices the highest wins; packages should stay above 100.
        verified: host → what was run on such a chip. A missing host starts with a WARNING.
        left_to_host: host → why its plugin does not run, and what runs instead.
        accelerator: whether it is a device with its own index, memory, streams and events, unlike the CPU.
        dtypes: dtypes of the models that it runs.
        float64: whether it computes in float64.
        float8: whether PyTorch supports float8_e4m3fn on it; such weights and caches are refused otherwise.
        quantized: hosts with a plugin that serves quantized checkpoints on it.
        quantized_latent: those among them that also serve models with latent attention from such checkpoints.
        pin_memory: whether pinned host memory helps.
        writes_pinned_memory: whether kernels may write to pinned host memory at its address.
        dist_backend: the ``torch.distributed`` backend of its collectives.
        flagcx_stream: the handle of the current stream in the device's own runtime, such as an ``aclrtStream``, which
            FlagCX takes; it returns ``None`` for host memory. If the field is ``None``, FlagCX cannot run here.
        triton: whether Triton may serve it, if a Triton driver supports it.
        inductor: the language in which Inductor writes code for it (``cpp``, ``triton``), or ``None`` for no code.
        graphs: whether it can capture and replay graphs.
        graph_class: the graph's class in the device's PyTorch module.
        graph_wrapper: host → path of the class with which it captures; by default the host's own class.
        unowned_view: returns a tensor over a tensor's memory that does not keep it alive, because the memory pool of
            captured graphs does; by default the tensor itself, so that graphs share less memory.
        forks: whether a process may fork after calling ``device_name`` and ``memory``, because they create no context;
            otherwise hosts spawn their processes.
        model_runners: which of vLLM's model runners (``v1``, ``v2``) run on it.
        workers: host → path of the worker's class; by default the plugin's class for an accelerator or a CPU.
        host_attention: host → the attention backend that the host chooses for this device, with its own code; the
            plugin replaces it.
        host_questions: host → its function, ``module:name``, that says whether this device is present. A yes would lead
            to code that needs the host's own kernels, so under the plugin it says no.
        host_kernels: host → its own name of this device, as in ``forward_cuda`` of its layers. Its kernels for other
            layers, its Triton kernels and its graph runner then run together with our operators.
        native_platforms: host → path of the host's own platform class for this device, extended with our operators.
        replaces_aten: whether FlagGems replaces PyTorch's own operators by default.
        detect: whether this machine has such a device.
        device_count: the number of devices.
        device_name: the product name, such as ``NVIDIA H200``.
        memory: bytes available now, and bytes in total.
        driver: the version of its driver; empty if there is none.
        capability: compute capability as (major, minor), or ``None`` if the device has none.
        compute_units: the number of processors that run programs independently. May create a context.
        warp_size: threads that run in step. May create a context.
        shared_memory: bytes of fast memory that one program may have, 0 if unknown. May create a context.
        cache_bytes: bytes of the last cache before memory, 0 if unknown. May create a context.
        manual_seed: seeds the random generators of all devices.
        synchronize: waits for all launched work.
        empty_cache: returns cached memory.
        refuse_waits: a context in which a call that waits for the device raises ``RuntimeError``; ``None`` if PyTorch
            cannot tell.
        shares_memory: whether one device maps the memory of another one of this machine, through PyTorch's symmetric
            memory and with atomic operations; ``None`` if that does not exist. May create a context.
        is_capturing: whether a graph is being captured in this thread's current stream. By default it calls
            ``torch.<torch_type>.is_current_stream_capturing``; a device without that function in its PyTorch module
            never captures.

    Raises:
        DeviceError: a field has a wrong type; the message names the spec, the field and what is needed.
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
    extension: str | None = None
    platform_config: str | Path | None = None
    visible_devices: str | None = None
    ray_resource: str = "GPU"
    priority: int = 100
    verified: Mapping[str, str] = field(default_factory=dict)
    left_to_host: Mapping[str, str] = field(default_factory=dict)
    accelerator: bool = True
    dtypes: tuple[torch.dtype, ...] = DTYPES
    float64: bool = False
    float8: bool = False
    quantized: tuple[str, ...] = ()
    quantized_latent: tuple[str, ...] = ()
    pin_memory: bool = False
    writes_pinned_memory: bool = False
    flagcx_stream: Callable[[], int | None] | None = None
    triton: bool = True
    inductor: str | None = None
    graphs: bool = False
    graph_class: str = "CUDAGraph"
    graph_wrapper: Mapping[str, str] = field(default_factory=dict)
    unowned_view: Callable[[torch.Tensor], torch.Tensor] = field(default=_itself)
    forks: bool = False
    model_runners: tuple[str, ...] = ("v1",)
    workers: Mapping[str, str] = field(default_factory=dict)
    host_attention: Mapping[str, str] = field(default_factory=dict)
    host_questions: Mapping[str, str] = field(default_factory=dict)
    host_kernels: Mapping[str, str] = field(default_factory=dict)
    native_platforms: Mapping[str, str] = field(default_factory=dict)
    replaces_aten: bool = True
    driver: Callable[[], str] = field(default=str)
    capability: Callable[[int], tuple[int, int] | None] = field(default=_nothing)
    compute_units: Callable[[int], int] = field(default=lambda index: 1)
    warp_size: Callable[[int], int] = field(default=lambda index: 1)
    shared_memory: Callable[[int], int] = field(default=_unknown)
    cache_bytes: Callable[[int], int] = field(default=_unknown)
    manual_seed: Callable[[int], None] = field(default=_nothing)
    synchronize: Callable[[], None] = field(default=_nothing)
    empty_cache: Callable[[], None] = field(default=_nothing)
    refuse_waits: Callable[[], AbstractContextManager[None]] | None = None
    shares_memory: Callable[[int, int], bool] | None = None
    is_capturing: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        for part in fields(self):
            needed, fits = _RULES[str(part.type)]
            value = getattr(self, part.name)
            if not fits(value):
                name = self.name if isinstance(self.name, str) else "?"
                raise DeviceError(name, f"{part.name} must be {needed}, not {value!r}")
        if self.inductor not in (None, CPP, TRITON):
            raise DeviceError(self.name, f"inductor must be '{CPP}', '{TRITON}' or None, not {self.inductor!r}")

    def check(self) -> None:
        """Raise ``DeviceError`` if PyTorch does not know the device's type, or its YAML file does not exist.

        Only the detected device is checked, because the type of another one may belong to a package that is not
        installed.
        """
        try:
            torch.device(self.torch_type)
        except RuntimeError as error:
            package = f"is the package that brings it ('{self.extension}') installed?" if self.extension else (
                "name the package that brings it in 'extension', or rename PyTorch's PrivateUse1 before"
            )  # fmt: skip
            raise DeviceError(self.name, f"PyTorch knows no device type '{self.torch_type}'; {package}") from error
        if isinstance(self.platform_config, Path) and not self.platform_config.is_file():
            raise DeviceError(self.name, f"platform_config names {self.platform_config}, which does not exist")

    def driver_version(self) -> str:
        """Return the driver's version; empty if there is none or the chip's function fails."""
        try:
            return self.driver()
        except Exception:  # of a vendor's function
            return ""

    def module(self) -> Any:
        """Return PyTorch's module of the device, such as ``torch.npu``; ``None`` if there is none."""
        return getattr(torch, self.torch_type, None)

    @property
    def is_foreign(self) -> bool:
        """Whether hosts do not know its streams and events, because it has a module other than ``torch.cuda``."""
        return self.accelerator and self.module() is not torch.cuda

    def stream_names(self) -> dict[str, Any]:
        """Return ``torch.cuda``'s names of streams, events and graphs → the device's own."""
        module = self.module()
        names = {name: name for name in STREAM_NAMES}
        if self.graphs:
            names |= {name: name for name in GRAPH_NAMES} | {"CUDAGraph": self.graph_class}
        return {name: getattr(module, own) for name, own in names.items() if hasattr(module, own)}

    def place(self, index: int = 0) -> str:
        """Return the PyTorch device with this index as text: ``npu:0``; the CPU has no index."""
        return f"{self.torch_type}:{index}" if self.accelerator else self.torch_type

    def captures(self) -> bool:
        """Whether a graph is being captured in this thread's current stream, see :attr:`is_capturing`."""
        if self.is_capturing is not None:
            return self.is_capturing()
        module = self.module()
        ask, initialized = (getattr(module, name, None) for name in ("is_current_stream_capturing", "is_initialized"))
        if ask is None or (initialized is not None and not initialized()):
            return False
        return bool(ask())

    def unverified(self, host: str) -> str:
        """Return why users should not rely on this device under a host yet; empty if they may."""
        if host in self.verified:
            return ""
        elsewhere = "; ".join(f"under {other} {what}" for other, what in self.verified.items())
        return f"device '{self.name}' was never verified under {host}" + (f" ({elsewhere})" if elsewhere else "")


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(part, str) for item in value.items() for part in item)


def _tuple_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(isinstance(part, kind) for part in value)


def _rule(annotation: str) -> tuple[str, Callable[[Any], bool]]:
    """Return the check of a field with this annotation, and its requirement in words."""
    optional = annotation.endswith(" | None") and not annotation.startswith("Callable[[int], tuple")
    kind = annotation.removesuffix(" | None") if optional else annotation
    needed, fits = next(rule for start, rule in _KINDS.items() if kind.startswith(start))
    if optional:
        return f"{needed}, or None", lambda value: value is None or fits(value)
    return needed, fits


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str | Path": ("a name or a pathlib.Path", lambda value: isinstance(value, str | Path)),
    "str": ("a string", lambda value: isinstance(value, str) and bool(value)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: type(value) is int),
    "Mapping": ("a mapping from hosts to strings", _mapping),
    "tuple[torch.dtype": ("a tuple of PyTorch dtypes", _tuple_of(torch.dtype)),
    "tuple[str": ("a tuple of strings", _tuple_of(str)),
    "Callable": ("a function", callable),
}
_RULES = {str(part.type): _rule(str(part.type)) for part in fields(DeviceSpec)}

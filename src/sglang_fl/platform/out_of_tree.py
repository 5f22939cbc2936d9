"""SGLang's platform class, derived from the :class:`~fl_dispatch.devices.DeviceSpec` of this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from sglang.srt.platforms import interface
from sglang.srt.platforms.device_mixin import DeviceCapability, PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from fl_dispatch.devices import detect_device

from .. import environment, speculation
from ..compat import native_kernels, state_forms
from ..compat.runtime import ATTENTION
from ..compat.v0_5_21 import OlderPlatform
from ..quantization import SERVED, config_class
from ..speculation import forms
from . import config, refusals, startup

DEVICE = detect_device()


def _capabilities() -> Any:
    """Return SGLang's ``PlatformCapabilities``; ``None`` for a version that asks :class:`OlderPlatform` instead."""
    kind = getattr(interface, "PlatformCapabilities", None)
    if kind is None:
        return None
    return kind(supports_triton=native_kernels.start_triton(), graph_capture=native_kernels.capture())


class PlatformFL(OlderPlatform, SRTPlatform):
    """An out-of-tree platform for any device that has a spec.

    Its ``capabilities`` claim nothing if SGLang has no code for the device: no graphs are captured, and SGLang's own
    Triton kernels do not run.
    """

    _enum = PlatformEnum.OOT
    device_name = DEVICE.name
    device_type = DEVICE.torch_type
    capabilities = _capabilities()
    supported_quantization = list(SERVED)  # noqa: RUF012  SGLang's type

    # -- the device ---------------------------------------------------------------------------------------------------

    def get_device(self, device_id: int | None = 0) -> str:
        """Return the device with this index; without an index, the current device."""
        return DEVICE.torch_type if device_id is None else DEVICE.place(device_id)

    def set_device(self, device: torch.device) -> None:
        if DEVICE.accelerator:
            torch.accelerator.set_device_index(device)

    def get_device_name(self, device_id: int = 0) -> str:
        return DEVICE.device_name(device_id)

    def get_device_uuid(self, device_id: int = 0) -> str:
        properties = getattr(DEVICE.module(), "get_device_properties", None)
        found = None if properties is None else getattr(properties(device_id), "uuid", None)
        return f"{DEVICE.name}-{device_id}" if found is None else str(found)

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        capability = DEVICE.capability(device_id)
        return None if capability is None else DeviceCapability(*capability)

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return DEVICE.memory(device_id)[1]

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        return DEVICE.memory(device_id)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        available, total = DEVICE.memory(0)
        return float(total - available)

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return DEVICE.pin_memory

    def synchronize(self) -> None:
        DEVICE.synchronize()

    def empty_cache(self) -> None:
        DEVICE.empty_cache()

    def get_torch_distributed_backend_str(self) -> str:
        return DEVICE.dist_backend

    def get_torch_profiler_activity_str(self) -> str:
        return DEVICE.torch_type.upper()

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        found = torch.profiler.ProfilerActivity.CPU
        with suppress(AttributeError):
            found = getattr(torch.profiler.ProfilerActivity, self.get_torch_profiler_activity_str())
        return found

    # -- what SGLang asks for -----------------------------------------------------------------------------------------

    def get_dispatch_key_name(self) -> str:
        return native_kernels.key()

    def get_default_attention_backend(self) -> str:
        return ATTENTION

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Return the backend for functions that SGLang compiles, such as the choice of experts, not for models."""
        return "eager" if DEVICE.inductor is None else "inductor"

    def get_kv_pool_cls(self, *, kind: str) -> type:
        from ..attention import pools

        return pools.POOLS[kind]

    def get_paged_allocator_cls(self) -> type:
        from ..attention import pools

        return pools.make_allocator  # type: ignore[return-value]  # SGLang only calls it

    def get_graph_runner_cls(self) -> type:
        if not native_kernels.capture():
            raise ValueError(f"sglang_fl captures no graphs on {DEVICE.name} yet")
        from ..graphs.decode import GraphRunnerFL

        return GraphRunnerFL

    def get_quantization_config(self, quantization: str) -> type | None:
        """Return our configuration for a served method; other methods were refused before a model loads."""
        return config_class(quantization)

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return speculation.serves(algorithm)

    def get_speculative_worker_cls(self, algorithm: str) -> None:
        """Return ``None``, because SGLang's own workers run once they are prepared."""
        from ..speculation import kernel_hooks

        kernel_hooks.prepare(algorithm)

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor] | None:
        """Return a function for the slots of tokens to verify, because SGLang's own is a Triton kernel."""
        return None if native_kernels.start_triton() else forms.slots_of_window

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        return torch.device(DEVICE.place(local_rank))

    # -- start-up -----------------------------------------------------------------------------------------------------

    @startup.START.refusing()
    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Run the parent's last step before processes start: raise errors, set defaults, leave our settings."""
        startup.activate()
        startup.START.warn_of_unverified_device()
        for sentence in environment.without_effect(DEVICE):
            startup.START.warn(sentence)
        config.apply_defaults(server_args, DEVICE)
        refusals.refuse_unsupported(server_args, DEVICE)
        config.hand_over()

    def init_backend(self) -> None:
        """Raise errors that an entry point kept in this process, when SGLang's model runner is imported.

        SGLang imports its models next.
        """
        startup.START.raise_kept()
        state_forms.prepare_models()

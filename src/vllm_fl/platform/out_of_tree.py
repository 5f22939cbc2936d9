"""vLLM's platform class, derived from the :class:`~fl_dispatch.devices.DeviceSpec` of this machine.

``is_cuda()`` and similar functions stay false, so vLLM takes its generic branch and calls ``forward_oot`` of every
layer. On an NVIDIA GPU :mod:`vllm_fl.platform.cuda` is the alternative: vLLM's own platform with our operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import why_unserved
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import variable_names

from .. import environment, quantization
from ..compat import accelerator, device_memory, kernels
from ..compilation import compile
from ..host import HOST
from . import config, refusals, startup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = get_logger(__name__)

DEVICE = detect_device()
GRAPH_WRAPPER = "vllm.compilation.cuda_graph.CUDAGraphWrapper"
accelerator.silence_accelerator()  # vLLM calls it in every process with the platform, engine or not


def _capability(device_id: int = 0) -> DeviceCapability | None:
    capability = DEVICE.capability(device_id)
    return None if capability is None else DeviceCapability(*capability)


class Dispatching:
    """The common part of our platforms: settings, configuration, worker and attention class. First base of each."""

    additional_env_vars: ClassVar[list[str]] = list(variable_names())  # Ray copies only the listed names
    native: ClassVar[bool] = False
    """Whether vLLM treats it as its own platform for this device."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: AttentionSelectorConfig, num_heads: int | None = None
    ) -> str:
        """Return the class that the operator ``attention_backend`` selects, if it can serve the layer.

        Raises:
            ValueError: it cannot serve the layer; the message names every reason.
        """
        path = config.attention_backend_path(attn_selector_config.use_mla, attn_selector_config.use_sparse)
        if selected_backend is not None and selected_backend.name != "CUSTOM":
            logger.warning(
                "attention backend %s instead of %s: the operator 'attention_backend' selects it; choose one of its "
                "implementations with VLLM_FL_PER_OP=attention_backend=TOKEN",
                path,
                selected_backend.name,
            )
        reasons = config.attention_refusals(path, attn_selector_config, _capability())
        if reasons:
            raise ValueError(f"attention backend {path} cannot serve this model: {', '.join(reasons)}")
        return path

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> type[MLAPrefillBackend]:
        from ..attention.mla_prefill import MLAFLPrefillBackend

        return MLAFLPrefillBackend

    # -- start-up -----------------------------------------------------------------------------------------------------

    @classmethod
    @startup.START.refusing()
    def pre_register_and_update(cls, parser: Any = None) -> None:
        startup.activate()
        environment.check(DEVICE)  # in the first process, because a worker is bound to its own cores

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        config.apply_defaults(vllm_config, DEVICE)

    @classmethod
    @startup.START.refusing()
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        startup.activate()
        if not config.is_packed(vllm_config):  # otherwise a parent process has logged it
            environment.check(DEVICE)
            startup.START.warn_of_unverified_device()
            for sentence in environment.without_effect(DEVICE):
                startup.START.warn(sentence)
        refusals.refuse_unsupported(vllm_config, DEVICE)
        config.adapt(vllm_config, DEVICE, native=cls.native)
        config.pack_settings(vllm_config)


class PlatformFL(Dispatching, Platform):
    """An out-of-tree platform for any device that has a spec."""

    _enum = PlatformEnum.OOT
    device_name = DEVICE.torch_type  # vLLM builds torch.device() from it; the chip's name is get_device_name()
    device_type = DEVICE.torch_type
    dispatch_key = DEVICE.dispatch_key
    dist_backend = DEVICE.dist_backend
    # Ray places workers by accelerators: start a machine without any with one for each worker (``ray start
    # --num-gpus``).
    ray_device_key = DEVICE.ray_resource
    device_control_env_var = DEVICE.visible_devices or Platform.device_control_env_var
    simple_compile_backend = compile.helper_backend(DEVICE)

    # -- the device ---------------------------------------------------------------------------------------------------

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return DEVICE.device_name(device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return DEVICE.memory(device_id)[1]

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Return bytes of this process's tensors on its device; all bytes in use if PyTorch does not count them."""
        allocated = getattr(DEVICE.module(), "memory_allocated", None) if DEVICE.accelerator else None
        if allocated is not None:
            return float(allocated(device))
        available, total = DEVICE.memory(0)
        return float(total - available)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return _capability(device_id)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        if DEVICE.accelerator:
            torch.accelerator.set_device_index(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        DEVICE.manual_seed(seed)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return DEVICE.pin_memory

    def is_sleep_mode_available(self) -> bool:
        return not DEVICE.accelerator or self.is_cumem_allocator_available()  # main memory needs no allocator

    def is_cumem_allocator_available(self) -> bool:
        return DEVICE.accelerator and not DEVICE.is_foreign and device_memory.loads()

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Accept layers with several caches: a decoder's layer may attend to itself and to an encoder."""

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        return []  # NIXL's worker would bind the computing thread to the last core of each node

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return DEVICE.compute_units(device_id)

    @classmethod
    @startup.START.refusing()
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        if dtype not in DEVICE.dtypes:
            raise ValueError(f"vllm_fl does not support models of dtype {dtype} on {DEVICE.name}")

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing: vLLM's compiled operators are not needed, and a vendor's backend loads its own library."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        if why_unserved():
            kernels.replace_kernels()

    # -- what vLLM may use --------------------------------------------------------------------------------------------

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return DEVICE.graphs

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return DEVICE.graph_wrapper.get(HOST.name, GRAPH_WRAPPER)

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        return DEVICE.graphs  # captured graphs need collectives that are opaque to Dynamo

    @classmethod
    def get_compile_backend(cls) -> str:
        return compile.model_backend(DEVICE)  # for models; simple_compile_backend is for vLLM's helper functions

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return compile.PASS_MANAGER

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_fl.worker.communicator.CommunicatorFL"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm_fl.layers.lora.PunicaWrapperFL"

    @classmethod
    @startup.START.refusing()
    def verify_quantization(cls, quant: str) -> None:
        quantization.verify(quant)

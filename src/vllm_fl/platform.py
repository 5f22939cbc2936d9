"""vLLM's platform class, derived from the :class:`~fl_dispatch.device.DeviceSpec` of this machine.

``is_cuda()`` and its like stay false, so vLLM takes its generic branch and calls ``forward_oot`` of every layer. What the
plugin cannot do yet is refused here, in one sentence, before a model loads; what it changes in a configuration is logged
with the reason.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import torch
from fl_dispatch import NoImplementationError, call_op
from fl_dispatch.device import detect_device
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import variable_names
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

from . import compat, startup

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = get_logger(__name__)

DEVICE = detect_device()
WORKER = "vllm_fl.worker.WorkerFL"

compat.silence_accelerator()


class PlatformFL(Platform):
    """An out-of-tree platform for any device that has a spec."""

    _enum = PlatformEnum.OOT
    device_name = DEVICE.torch_type  # vLLM builds torch.device() from it; the chip's name is get_device_name()
    device_type = DEVICE.torch_type
    dispatch_key = DEVICE.dispatch_key
    dist_backend = DEVICE.dist_backend
    device_control_env_var = DEVICE.visible_devices or Platform.device_control_env_var
    simple_compile_backend = "eager"  # vLLM's small helper functions need no C++ compiler at run time
    additional_env_vars = list(variable_names())  # Ray copies only names that it is told

    # -- the device ---------------------------------------------------------------------------------------------------

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return DEVICE.device_name(device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return DEVICE.memory(device_id)[1]

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        available, total = DEVICE.memory(0)
        return float(total - available)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        capability = DEVICE.capability(device_id)
        return None if capability is None else DeviceCapability(*capability)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        if DEVICE.torch_type != "cpu":
            torch.accelerator.set_device_index(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        DEVICE.manual_seed(seed)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return DEVICE.pin_memory

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return torch.get_num_threads()

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype {dtype} is not supported by vllm_fl on {DEVICE.name}")

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's compiled operators are not needed; a vendor backend loads what it wraps."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        if DEVICE.torch_type == "cpu":
            compat.replace_kernels()

    # -- what vLLM may use --------------------------------------------------------------------------------------------

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return True

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"  # plain PyTorch

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: AttentionSelectorConfig, num_heads: int | None = None
    ) -> str:
        """The class that the operator ``attention_backend`` selects, if it can do what the layer needs.

        Raises:
            ValueError: it cannot; the message names every reason.
        """
        if selected_backend is not None and selected_backend.name != "CUSTOM":
            logger.info(
                "attention backend %s is not used: the operator 'attention_backend' selects it", selected_backend.name
            )
        path = attention_backend_path(attn_selector_config.use_mla)
        reasons = _unsupported(path, attn_selector_config)
        if reasons:
            raise ValueError(f"attention backend {path} cannot serve this model: {', '.join(reasons)}")
        return path

    # -- start-up -----------------------------------------------------------------------------------------------------

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        startup.activate()

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        raise ValueError(f"quantization '{quant}' is not supported by vllm_fl yet; use an unquantized checkpoint")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Where the user chose nothing: our layers run (``custom_ops``), and models run eagerly."""
        from vllm.config import CompilationMode

        compilation = vllm_config.compilation_config
        if not {"all", "none"} & set(compilation.custom_ops):
            compilation.custom_ops.append("all")
        if compilation.mode is None:
            compilation.mode = CompilationMode.NONE

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what is not supported, adapt what is, and pack settings and policy for every child process."""
        startup.activate()
        _refuse(vllm_config)
        _adapt(vllm_config)
        _pack(vllm_config)


def attention_backend_path(use_mla: bool) -> str:
    """The attention class for a kind of attention.

    Raises:
        ValueError: no implementation of ``attention_backend`` has one.
    """
    try:
        path: str = call_op("attention_backend", use_mla)
    except (NoImplementationError, NotImplementedError) as error:
        kind = "multi-head latent attention (MLA)" if use_mla else "attention"
        raise ValueError(
            f"{kind} is not supported: no implementation of 'attention_backend' offers it ({error})"
        ) from error
    return path


def _unsupported(path: str, config: AttentionSelectorConfig) -> list[str]:
    """Why the attention class cannot serve a layer, in its own words; the fields differ between vLLM's versions."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    validate = resolve_obj_by_qualname(path).validate_configuration
    known = inspect.signature(validate).parameters
    fields = {name: value for name, value in config._asdict().items() if name in known}
    return validate(**fields, device_capability=PlatformFL.get_device_capability())


def _model_refusals(model: ModelConfig) -> list[tuple[bool, str]]:
    return [
        (model.is_encoder_decoder, "encoder-decoder models are not supported"),
        (model.attn_type == "encoder_only", "encoder-only models are not supported"),
        (model.is_hybrid or model.is_attention_free, "state-space and linear-attention layers are not supported"),
        (model.is_moe, "mixture-of-experts layers are not supported"),
    ]


def _refuse(vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` with one sentence for the first thing that cannot be served."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    refusals = [
        (vllm_config.speculative_config is not None, "speculative decoding is not supported"),
        (
            vllm_config.cache_config.cache_dtype.startswith(("fp8", "int", "nvfp4", "turbo", "ultra")),
            "a quantized KV cache is not supported",
        ),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism is not supported"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism is not supported"),
        (parallel.enable_dbo, "dual-batch overlap is not supported"),
        (
            os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1",
            "vLLM's V2 model runner needs Triton; unset VLLM_USE_V2_MODEL_RUNNER",
        ),
        *([] if model is None else _model_refusals(model)),
    ]
    for refused, sentence in refusals:
        if refused:
            name = "" if model is None else f" ({model.model})"
            raise ValueError(
                f"vllm_fl on {DEVICE.name}: {sentence} yet{name}" if sentence.endswith("supported") else sentence
            )
    if model is not None:
        attention_backend_path(model.use_mla)


def _set(config: Any, field: str, value: Any, reason: str) -> None:
    """Change one field of a configuration, and say so."""
    before = getattr(config, field)
    if before != value:
        logger.info("%s.%s: %s instead of %s, %s", type(config).__name__, field, value, before, reason)
        setattr(config, field, value)


def _adapt(vllm_config: VllmConfig) -> None:
    """Set what the worker needs."""
    from vllm.config import CompilationMode

    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = WORKER
    _set(parallel, "disable_custom_all_reduce", True, "it is a CUDA kernel")
    _set(compilation, "mode", CompilationMode.NONE, "compiled models are not supported yet")
    _set(vllm_config.scheduler_config, "async_scheduling", False, f"{DEVICE.name} has no events to wait for")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the worker's runner is the V1 one; children must agree
    if DEVICE.torch_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, torch.get_num_threads() // parallel.world_size)
        logger.info(
            "OMP_NUM_THREADS=%d: vLLM would serve on one thread, which is for models that run on an accelerator",
            threads,
        )
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _pack(vllm_config: VllmConfig) -> None:
    existing = vllm_config.additional_config
    if not isinstance(existing, dict):
        raise ValueError(
            "vllm_fl carries its settings to vLLM's processes in additional_config, which must be a dictionary"
        )
    packed = {**startup.pack(), **existing.get(startup.CONFIG_KEY, {})}
    vllm_config.additional_config = {
        **existing,
        startup.CONFIG_KEY: packed,
    }  # a copy: the user's dictionary stays as it is

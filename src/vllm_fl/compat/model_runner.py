"""Choose a model runner if Triton has no driver for the device: V2 with our forms of its kernels, else V1.

vLLM checks whether Triton is installed and finds a driver, which is true on a machine with a GPU whatever device is
served. Every process with a configuration makes this check, so each is set up. An environment variable would reach them
as well, but vLLM treats ``VLLM_USE_V2_MODEL_RUNNER`` as the user's choice, in later configurations too, so only the
user sets it. vLLM's own rule lists the features that V2 lacks; V1 then runs.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from fl_dispatch.devices import DeviceSpec, detect_device
from fl_dispatch.devices.triton import why_unserved
from vllm import envs

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

CONFIG = "vllm.config.vllm"
WORKER = "vllm.v1.worker.gpu_worker"
BUFFERS = "vllm.v1.worker.gpu.buffer_utils"
UTILS = "vllm.v1.worker.utils"
VERIFICATIONS = ("", "standard", "synthetic")
"""Methods of verifying drafts with forms; empty without speculation."""
DRAFTS = ("draft_model", "eagle", "eagle3", "mtp")
"""Speculation by a model with kernels that have forms."""
HOST_AS_DEVICE = "vllm.v1.worker.cpu.shm"


def do_without_triton(v2: bool) -> None:
    """Make vLLM's configuration choose a runner for a device without a Triton driver. Idempotent.

    Args:
        v2: whether the V2 runner's kernels have forms for the device; it then serves the configurations that they
            cover.
    """
    module: Any = importlib.import_module(CONFIG)
    module.HAS_TRITON = v2
    config = module.VllmConfig
    if v2 and not hasattr(config._get_v2_model_runner_unsupported_features, "__wrapped__"):
        config._get_v2_model_runner_unsupported_features = _with_ours(config._get_v2_model_runner_unsupported_features)


def _with_ours(vllms: Any) -> Any:
    @wraps(vllms)
    def unsupported(self: VllmConfig) -> list[str]:
        return [*vllms(self), *without_forms(self)]

    return unsupported


def prepare(device: DeviceSpec) -> None:
    """Prepare vLLM's modules for a worker's V2 runner, before the worker is made. Idempotent.

    The runner's kernels get forms if Triton has no driver.
    """
    if not device.accelerator:
        importlib.import_module(HOST_AS_DEVICE)  # vLLM's streams, events and pinned memory for main memory as device
    if not device.accelerator or device.is_foreign:
        buffers: Any = importlib.import_module(BUFFERS)
        buffers.is_uva_available = lambda: not device.accelerator
    if why_unserved():
        from ..runner_kernels import states, table

        worker: Any = importlib.import_module(WORKER)
        worker.HAS_TRITON = True  # otherwise vLLM 0.33's class refuses to be made
        table.register(main_memory=not device.accelerator)
        if device.accelerator:
            states.clear_as_tensors(importlib.import_module(UTILS).KVBlockZeroer)


def kernels(device: DeviceSpec) -> str:
    """Return the languages of the kernels that this process's V2 runner launches on the device."""
    if not why_unserved():
        return "Triton"
    from ..runner_kernels import native

    return "C++ and PyTorch" if not device.accelerator and native.compiles() else "PyTorch"


class Choice(NamedTuple):
    """A model runner, ``V1`` or ``V2``, and why a configuration gets it."""

    runner: str
    why: str

    def __str__(self) -> str:
        return f"{self.runner}, because {self.why}"


def choice(config: VllmConfig) -> Choice:
    """Return the runner that vLLM's own rule gives a configuration, and why."""
    v2 = config.use_v2_model_runner
    if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        return Choice("V2" if v2 else "V1", "VLLM_USE_V2_MODEL_RUNNER asks for it")
    if v2:
        forms = " (its kernels in our forms)" if why_unserved() else ""
        return Choice("V2", f"vLLM prefers it and it has all that is asked for{forms}")
    if "v2" not in (device := detect_device()).model_runners:
        return Choice("V1", f"V2 does not run on {device.name} yet")
    lacking = ", ".join(config._get_v2_model_runner_unsupported_features()) or "vLLM's preference in this version"
    return Choice("V1", f"V2 lacks {lacking}")


def without_forms(config: VllmConfig) -> list[str]:
    """Return the parts of a configuration without a PyTorch form, or without a hook in V2."""
    parallel, speculation = config.parallel_config, config.speculative_config
    method = getattr(speculation, "method", None)
    asked = {
        f"drafts by '{method}'": speculation is not None and not speculation.use_ngram() and method not in DRAFTS,
        "drafts verified by blocks": getattr(speculation, "rejection_sample_method", "") not in VERIFICATIONS,
        "watermarks": getattr(config, "watermark_config", None) is not None,
        "sampling divided among ranks": getattr(parallel, "enable_batch_sharded_sampling", False),
    }
    lacking = [f"{feature} without Triton" for feature, present in asked.items() if present]
    model = config.model_config
    if model is not None and any(_is_for_v1(given) for given in model.logits_processors or ()):
        lacking.append("processors of logits that are written for V1")
    return lacking


def has_several_predictors(speculation: SpeculativeConfig | None) -> bool:
    """Whether several predictors of one model draft, each one token."""
    return speculation is not None and speculation.use_multi_module_mtp()


def _is_for_v1(given: str | type) -> bool:
    """Whether a logits processor, a class or ``module:class``, is for the V1 runner only, so that V2 refuses it."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ForV2

    try:
        found = given if isinstance(given, type) else pkgutil.resolve_name(given)
    except (ImportError, AttributeError, ValueError):
        return False
    return isinstance(found, type) and issubclass(found, LogitsProcessor) and not issubclass(found, ForV2)

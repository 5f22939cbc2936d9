"""LoRA under SGLang on machines that cannot pin memory, and refusals of adapters that SGLang would serve wrongly.

SGLang pins the memory of adapters unconditionally, which PyTorch refuses on a machine without an accelerator. There its
backend :data:`BACKEND` runs, which supports less than the Triton backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.memory.pinning import unpinned

if TYPE_CHECKING:
    from sglang.srt.lora.lora_config import LoRAConfig
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import nn

BACKEND = "torch_native"
"""SGLang's LoRA backend in PyTorch."""
PINNING = ("fetch_new_loras", "load_lora_adapter", "load_lora_adapter_from_tensors", "prepare_lora_batch")
"""Methods of SGLang's adapter manager that its model runner calls and that pin memory."""
MERGED = {("q_proj", "v_proj"): ("k_proj",), ("gate_proj",): ("up_proj",)}
"""Projections that SGLang fuses into one product: without the first ones it finds no place for the others."""
NOT_PROJECTIONS = {"embed_tokens", "lm_head"}
OF_EXPERTS = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}
BY_TRITON = "experts (SGLang multiplies their factors by Triton kernels alone, in FusedMoEWithLoRA of lora/layers.py)"


def init_lora_manager(original: Callable[[ModelRunner], None], runner: ModelRunner) -> None:
    """Make SGLang's adapter manager; if memory cannot be pinned, stop it and its methods from pinning.

    Raises:
        ValueError: the model's layers support adapters only in Triton.
    """
    device, path = detect_device(), runner.model_config.model_path
    asked = {*(runner.server_args.lora_target_modules or ())}
    for present, what in (
        (runner.use_mla_backend, "latent attention"),
        (asked & {*OF_EXPERTS, "all"} and _has_experts(runner.model), BY_TRITON),
    ):
        if present:
            raise ValueError(f"sglang_fl does not support LoRA of {what} on {device.name} yet (model {path})")
    if device.pin_memory:
        original(runner)
        return
    unpinned(original)(runner)
    for name in PINNING:
        setattr(runner.lora_manager, name, unpinned(getattr(runner.lora_manager, name)))


def _has_experts(model: nn.Module) -> bool:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return any(isinstance(layer, FusedMoE) for layer in model.modules())


def validate_new_adapter(
    original: Callable[..., None], manager: LoRAManager, lora_config: LoRAConfig, lora_ref: LoRARef
) -> None:
    """Run SGLang's check of an adapter and ours, at the start and while serving.

    Raises:
        ValueError: SGLang would load the adapter and compute something else, or crash at its first request.
    """
    for what in _unserved(lora_config.hf_config, _has_experts(manager.base_model)):
        raise ValueError(f"sglang_fl does not support adapters with {what} yet (adapter {lora_ref.lora_name})")
    original(manager, lora_config, lora_ref)


def _unserved(said: Mapping[str, Any], experts: bool) -> Iterator[str]:
    """Yield in words the unserved parts of an adapter's configuration (PEFT's ``adapter_config.json``).

    Args:
        experts: whether the model has experts.
    """
    targets = said["target_modules"]
    if experts and (isinstance(targets, str) or {target.rpartition(".")[2] for target in targets} & OF_EXPERTS):
        yield BY_TRITON
    names = set() if isinstance(targets, str) else {target.rpartition(".")[2] for target in targets}
    for name in sorted(names & NOT_PROJECTIONS):
        taken = f"{BACKEND} takes for a projection of all tokens"
        yield f"'{name}', which {'is untested here' if detect_device().accelerator else taken}"
    for key in ("modules_to_save", "use_rslora", "alpha_pattern", "rank_pattern", "layers_to_transform"):
        if said.get(key):
            yield f"{key}={said[key]!r}, which SGLang does not read"
    if said.get("bias", "none") != "none":
        yield f"bias={said['bias']!r}, which SGLang does not read"
    for needed, merged in MERGED.items():
        if names & {*needed, *merged} and not names >= set(needed):
            parts = ", ".join(sorted(names & {*needed, *merged}))
            yield f"{parts} without {', '.join(sorted(set(needed) - names))}, which SGLang merges"

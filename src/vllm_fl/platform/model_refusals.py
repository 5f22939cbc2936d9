"""Refusals that depend on a model's layers: states, experts, sparse latent attention, and quantized weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_dispatch.devices import DeviceSpec
from fl_dispatch.devices.triton import why_unserved
from fl_dispatch.hosting.quantized import experts as quantized_experts
from fl_dispatch.hosting.start.first_choices import without_graphs, without_kernels
from fl_dispatch.settings import get_settings

from .. import quantization
from ..compat import model_runner, models, versions
from ..compat.models import STATES
from ..host import HOST
from ..layers import delta_net, mamba2, short_conv

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

EXPERT_LAYERS = {
    "UnquantizedFusedMoEMethod": ("fused_moe",),
    "MoERunner": ("topk_softmax", "topk_sigmoid", "grouped_topk"),
}
"""The layers that every mixture of experts needs, with their operators (see :mod:`vllm_fl.layers.mixture`)."""
STATE_LAYERS = {
    "QwenGatedDeltaNetAttention": delta_net.OPERATORS,
    "MambaMixer": mamba2.OPERATORS,
    "MambaMixer2": mamba2.OPERATORS,
    "ShortConv": short_conv.OPERATORS,
}
"""Our layers with a state, with their operators."""
STATE_MODELS = {
    "Qwen3NextForCausalLM": "QwenGatedDeltaNetAttention",
    "Qwen3_5ForCausalLM": "QwenGatedDeltaNetAttention",
    "Qwen3_5MoeForCausalLM": "QwenGatedDeltaNetAttention",
    "Qwen3_5ForConditionalGeneration": "QwenGatedDeltaNetAttention",
    "Qwen3_5MoeForConditionalGeneration": "QwenGatedDeltaNetAttention",
    "MambaForCausalLM": "MambaMixer",
    "FalconMambaForCausalLM": "MambaMixer",
    "JambaForCausalLM": "MambaMixer",
    "Mamba2ForCausalLM": "MambaMixer2",
    "GraniteMoeHybridForCausalLM": "MambaMixer2",
    "FalconH1ForCausalLM": "MambaMixer2",
    "NemotronHForCausalLM": "MambaMixer2",
    "Zamba2ForCausalLM": "MambaMixer2",
    "Lfm2ForCausalLM": "ShortConv",
    "Lfm2MoeForCausalLM": "ShortConv",
}
"""Models with our layers for all states: architecture → the class of these layers."""
SPARSE_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV32MTPModel")
"""Models with our indexer; the last one drafts for either of the others."""
SPARSE_DRAFTS = ("ngram", "mtp")
"""Speculation by these models."""


def model_features(model: ModelConfig | None, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of a model, or of a draft model."""
    from vllm.platforms import current_platform

    if model is None:
        return []
    return [
        (
            model.is_encoder_decoder and device.accelerator and (device.is_foreign or "v2" not in device.model_runners),
            "encoder-decoder models",
        ),
        *quantization_features(model, device),
        (
            models.has_states(model) and not serves_states(model, device),
            f"the layers with a state of {model.architecture}",
        ),
        (models.has_indexer(model) and model.architecture not in SPARSE_MODELS, "this model's sparse attention"),
        (
            models.is_unbalanced(model) and not current_platform.is_out_of_tree(),
            f"{model.architecture} in float16 on vLLM's own platform (its MoERunner scales the shared experts wrongly)",
        ),
    ]


def quantization_features(model: ModelConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of a quantized checkpoint."""
    from vllm.platforms import current_platform

    if model.quantization is None or not current_platform.is_out_of_tree():  # vLLM's own platform has its own kernels
        return []
    name = quantization.SERVED[model.quantization].name
    experts_wait = model.is_moe and device.accelerator and bool(without_graphs(quantized_experts.OPERATORS))
    return [
        (model.use_mla and HOST.name not in device.quantized_latent, f"latent attention quantized by '{name}'"),
        (experts_wait, f"experts quantized by '{name}'"),
        (
            STATE_MODELS.get(model.architecture) == "MambaMixer",
            f"models with layers of Mamba 1 quantized by '{name}' (vLLM's layer has no quantized products)",
        ),
        (model.model_arch_config.quantization_config is None, f"'{name}' for a checkpoint that is not quantized"),
    ]


# -- layers with a state ----------------------------------------------------------------------------------------------


def serves_states(model: ModelConfig, device: DeviceSpec) -> bool:
    """Whether the layers with a state are ours and have kernels, and vLLM's kernels next to them run or have forms.

    Forms exist in main memory, and on accelerators that vLLM does not know.
    """
    layer = STATE_MODELS.get(model.architecture)
    if layer is None or not versions.is_tested():
        return False
    if device.accelerator and not device.is_foreign and why_unserved():
        return False
    return not without_kernels(STATE_LAYERS[layer], device)


def state_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of models with states; a state must go back to the accepted drafts."""
    model = vllm_config.model_config
    if not models.has_states(model):
        return []
    runner, drafts = model_runner.choice(vllm_config), vllm_config.speculative_config is not None
    v1, without_triton = runner.runner == "V1", bool(why_unserved())
    return [
        (v1 and without_triton and device.is_foreign, f"{STATES} by the V1 model runner without Triton"),
        (drafts and v1, f"speculative decoding by {STATES} by the V1 model runner ({runner.why})"),
        (drafts and without_triton and device.accelerator, f"speculative decoding by {STATES} without Triton"),
        (
            drafts and STATE_MODELS.get(model.architecture) == "MambaMixer",
            "speculation by models with Mamba 1 (vLLM keeps no state a draft: mamba1_state_shape in mamba_utils.py)",
        ),
    ]


# -- sparse latent attention ------------------------------------------------------------------------------------------


def sparse_features(vllm_config: VllmConfig, device: DeviceSpec) -> list[tuple[bool, str]]:
    """Return the unserved features of sparse latent attention."""
    from vllm.platforms import current_platform

    if not models.has_indexer(vllm_config.model_config):
        return []
    attention, sparse = vllm_config.attention_config, "sparse latent attention"
    speculation = getattr(vllm_config.speculative_config, "method", None)
    return [
        (not current_platform.is_out_of_tree(), f"{sparse} on vLLM's own platform (VLLM_FL_NATIVE_PLATFORM)"),
        (not versions.is_tested(), f"{sparse} with vLLM {versions.host_version()}"),
        (speculation is not None and HOST.name not in device.verified, f"speculative decoding by {sparse}"),
        (speculation not in (None, *SPARSE_DRAFTS), f"speculative decoding with '{speculation}' by {sparse}"),
        (vllm_config.kv_transfer_config is not None, f"KV transfer with {sparse}"),
        (attention.hisparse_config is not None, f"{sparse} with a cache on the host (hisparse_config)"),
        (
            attention.indexer_kv_dtype not in ("auto", "bf16", "fp8"),
            f"index keys of type {attention.indexer_kv_dtype}",
        ),
    ]


# -- layers that must be ours -----------------------------------------------------------------------------------------


def refuse_native_layers(model: ModelConfig) -> None:
    """Refuse lists that leave layers to vLLM for which it has no code here."""
    settings = get_settings()
    needed = [("experts", one) for one in EXPERT_LAYERS.items() if model.is_moe]
    if (layer := STATE_MODELS.get(model.architecture)) is not None:
        needed.append(("layers with a state", (layer, STATE_LAYERS[layer])))
    for what, (name, operators) in needed:
        if not any(settings.registers(name, operator) for operator in operators):
            raise ValueError(
                f"model {model.model} has {what}, and vLLM has no code for that on an out-of-tree platform, "
                f"but a list or a switch leaves out {name} ({', '.join(operators)})"
            )

"""More architectures that vLLM serves, as small random checkpoints, with features that none of our families has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_dispatch.cli.checkpoints import VOCABULARY, write_checkpoint

_IDS: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_PLAIN: Mapping[str, Any] = {
    **_IDS,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
_GROUPED: Mapping[str, Any] = {**_PLAIN, "num_key_value_heads": 2}
_HEADS: Mapping[str, Any] = {**_GROUPED, "head_dim": 16}
_TIED: Mapping[str, Any] = {"tie_word_embeddings": True}  # if vLLM supports only this
_GPT2 = {**_IDS, **_TIED, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024}
_DELTA: Mapping[str, Any] = {
    **_HEADS,
    "num_hidden_layers": 4,
    "layer_types": 2 * ["linear_attention", "full_attention"],  # both in each of two pipeline stages
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_MAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_EXPERTS: Mapping[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
}
"""Experts of which a shared one sees every token.
"""

WITHOUT_ATTENTION = {"mamba", "falcon_mamba", "mamba2"}
"""The architectures that ``test_states.py`` runs."""

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("GPT2Config", _GPT2),  # learned positions, one product for query, key and value
    "opt": ("OPTConfig", {**_PLAIN, **_TIED, "ffn_dim": 160, "word_embed_proj_dim": 64, "dropout": 0.0}),
    "gpt_neox": ("GPTNeoXConfig", {**_PLAIN, "rotary_pct": 0.25}),  # attention and feed-forward side by side
    "falcon": ("FalconConfig", {**_PLAIN, **_TIED, "multi_query": True, "ffn_hidden_size": 256}),
    "phi": ("PhiConfig", {**_PLAIN, "partial_rotary_factor": 0.5}),  # a bias in the head
    "stablelm": ("StableLmConfig", {**_GROUPED, "partial_rotary_factor": 0.25}),
    "starcoder2": ("Starcoder2Config", {**_GROUPED, "sliding_window": 32}),
    "cohere": ("CohereConfig", {**_GROUPED, **_TIED, "use_qk_norm": True, "logit_scale": 4.0}),
    "cohere2": (
        "Cohere2Config",
        {**_HEADS, **_TIED, "sliding_window": 32, "sliding_window_pattern": 3, "logit_scale": 4.0},
    ),
    "olmo2": ("Olmo2Config", _GROUPED),  # norms behind attention and feed-forward
    "olmoe": ("OlmoeConfig", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("GraniteConfig", {**_GROUPED, "attention_multiplier": 0.25, "residual_multiplier": 0.7}),
    "granitemoe": ("GraniteMoeConfig", {**_GROUPED, **_EXPERTS, "attention_multiplier": 0.25}),
    "mistral": ("MistralConfig", {**_HEADS, "sliding_window": 32}),
    "smollm3": ("SmolLM3Config", {**_GROUPED, "no_rope_layer_interval": 2}),  # layers without positions
    "glm4": ("Glm4Config", {**_HEADS, "partial_rotary_factor": 0.5}),  # four norms a layer, pairs rotated
    "gpt_oss": ("GptOssConfig", {**_HEADS, **_EXPERTS, "sliding_window": 32}),  # sinks, biased experts
    "qwen2": ("Qwen2Config", _GROUPED),  # a bias in query, key and value
    "qwen2_moe": ("Qwen2MoeConfig", {**_GROUPED, **_SHARED}),
    "ernie4_5": ("Ernie4_5Config", _HEADS),
    "nemotron": ("NemotronConfig", {**_HEADS, "partial_rotary_factor": 0.5}),  # the square of ReLU
    "exaone4": ("Exaone4Config", {**_HEADS, "sliding_window": 32, "sliding_window_pattern": 2}),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),  # the gated delta net beside attention with a gate
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_DELTA, **_SHARED}),
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA, **_SHARED}),
    "mamba": ("MambaConfig", {**_IDS, **_TIED, "hidden_size": 64, "num_hidden_layers": 4}),  # no attention at all
    "falcon_mamba": ("FalconMambaConfig", {**_IDS, "hidden_size": 64, "num_hidden_layers": 4}),  # norms without weights
    "jamba": (
        "JambaConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "mamba2": (  # no attention at all
        "Mamba2Config",
        {
            **_IDS,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 24,
            "n_groups": 1,  # with more of them Transformers' norm has one mean, and vLLM's one for each
            "chunk_size": 16,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_GROUPED,
            **_MAMBA,
            **_EXPERTS,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "num_hidden_layers": 4,
            "layer_types": 2 * ["mamba", "attention"],
            "shared_intermediate_size": 96,
            "attention_multiplier": 0.25,
        },
    ),
    "falcon_h1": (  # both in each layer, side by side
        "FalconH1Config",
        {**_HEADS, **_MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{key: value for key, value in _HEADS.items() if key != "num_hidden_layers"},
            "hybrid_override_pattern": "M*-M",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 24,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **_PLAIN,
            **_TIED,
            "num_hidden_layers": 4,
            "layers_block_type": 2 * ["mamba", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_d_state": 24,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "adapter_rank": 8,
        },
    ),
    "lfm2": (  # short convolutions
        "Lfm2Config",
        {
            **_GROUPED,
            **_TIED,
            "num_hidden_layers": 4,
            "layer_types": 2 * ["conv", "full_attention"],
            "conv_dim": 64,
            "block_dim": 64,
            "block_multiple_of": 32,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_GROUPED,
            **_TIED,
            "num_hidden_layers": 4,
            "layer_types": 2 * ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
        },
    ),
    "gemma": ("GemmaConfig", {**_HEADS, **_TIED, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma3n": (  # the upper half of the layers reads the cache of lower ones
        "Gemma3nTextConfig",
        {
            **_HEADS,
            **_TIED,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 16,
            "altup_num_inputs": 4,
            "activation_sparsity_pattern": [0.9] + [0.0] * 3,
        },
    ),
}
"""Name → class of its configuration in Transformers, and the fields of a small model."""


def build_architecture(name: str, path: Path, **sizes: Any) -> Path:
    """Write a checkpoint of one of :data:`ARCHITECTURES`, identical at every call; ``sizes`` override its own."""
    import transformers

    kind, shape = ARCHITECTURES[name]
    return write_checkpoint(getattr(transformers, kind)(**{**shape, **sizes}), path)

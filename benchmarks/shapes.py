"""Shapes of published models for ``serve_vllm.py``: the dimensions of their ``config.json``; the weights are random."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMMON: Mapping[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA: Mapping[str, Any] = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
LLAMA_1B: Mapping[str, Any] = {
    **LLAMA,
    "tie_word_embeddings": True,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
}
"""Llama-3.2-1B."""
QWEN3_MOE: Mapping[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "attention_bias": False,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
DEEPSEEK_V2_LITE: Mapping[str, Any] = {
    **COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "attention_bias": False,
    "max_position_embeddings": 163_840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
QWEN3: Mapping[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}
"""Qwen3-8B."""
QWEN3_EAGLE3: Mapping[str, Any] = {
    **QWEN3,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 32_000,
}
"""The published EAGLE-3 heads of Qwen3-8B."""
QWEN3_SMALL: Mapping[str, Any] = {
    **QWEN3,
    "tie_word_embeddings": True,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
"""Qwen3-0.6B."""
GEMMA3: Mapping[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 262_208,
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "attention_bias": False,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
"""The text model of Gemma-3-4B."""
DEEPSEEK_V3: Mapping[str, Any] = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "attention_bias": False,
    "max_position_embeddings": 163_840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""The three dense layers of DeepSeek-V3, without a stretched rotation."""
DEEPSEEK_V3_2: Mapping[str, Any] = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}

LAYERS = ("linear", "rms_norm", "gemma_rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding")
"""Operators that vLLM itself leaves to PyTorch and Inductor when it compiles."""
EXPERTS = ("topk_softmax", "grouped_topk", "moe_align_block_size", "fused_moe", "moe_sum")
FLASH_AND_TRITON: Mapping[str, str] = {"fa3": "FLASH_ATTN", "triton": "TRITON_ATTN"}


@dataclass(frozen=True)
class Shape:
    """A model.

    Args:
        config: its ``config.json``.
        attention: operators that read the cache.
        experts: operators of its experts, if it has any.
        vanilla: short name → vLLM's own attention classes; ``None`` for the one that vLLM chooses.
        cached: elements that a layer caches for a token.
        layer, rest: millions of parameters of a layer (one with experts), and of the embeddings and the head.
        odd: modules whose rows or columns are no whole blocks of 128; vLLM's own quantization to blocks refuses them.
    """

    config: Mapping[str, Any]
    attention: tuple[str, ...]
    experts: tuple[str, ...]
    vanilla: Mapping[str, str | None]
    cached: int
    layer: float
    rest: float
    odd: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Number of layers of the published model."""
        return int(self.config["num_hidden_layers"])

    @property
    def operators(self) -> tuple[str, ...]:
        """All operators that a step calls."""
        return (*LAYERS, "kv_cache_write", *self.attention, *self.experts)

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return "mla_decode" in self.attention

    def cache_bytes(self, layers: int, tokens: int) -> int:
        """Return bytes of a bfloat16 cache."""
        return tokens * layers * self.cached * 2

    def gib(self, layers: int, tokens: int) -> float:
        """Memory of one engine, about: weights, cache, and 4 GiB for activations, graphs and the process."""
        return (2e6 * (layers * self.layer + self.rest) + self.cache_bytes(layers, tokens)) / 2**30 + 4


SHAPES: Mapping[str, Shape] = {
    "llama-3.1-8b": Shape(LLAMA, ("paged_attention",), (), FLASH_AND_TRITON, 2 * 8 * 128, 218.1, 1050.7),
    "llama-3.2-1b": Shape(LLAMA_1B, ("paged_attention",), (), FLASH_AND_TRITON, 2 * 8 * 64, 60.8, 262.7),
    "qwen3-0.6b": Shape(QWEN3_SMALL, ("paged_attention",), (), FLASH_AND_TRITON, 2 * 8 * 128, 15.7, 155.6),
    "qwen3-30b-a3b": Shape(QWEN3_MOE, ("paged_attention",), EXPERTS, FLASH_AND_TRITON, 2 * 4 * 128, 623.1, 622.3),
    "qwen3-8b": Shape(QWEN3, ("paged_attention",), (), FLASH_AND_TRITON, 2 * 8 * 128, 192.9, 1244.7),
    "gemma-3-4b": Shape(GEMMA3, ("paged_attention",), (), FLASH_AND_TRITON, 2 * 4 * 256, 94.4, 671.3),
    "deepseek-v2-lite": Shape(
        DEEPSEEK_V2_LITE,
        ("mla_decode", "mla_prefill"),
        EXPERTS,
        {"fa3": "FLASH_ATTN_MLA", "triton": "TRITON_MLA"},
        512 + 64,
        584.7,
        419.4,
        tuple(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ),
    "deepseek-v3-dense": Shape(
        DEEPSEEK_V3, ("mla_decode", "mla_prefill"), (), {"auto": None, "fa3": "FLASH_ATTN_MLA"}, 576, 583.5, 1853.4
    ),
    "deepseek-v3.2-dense": Shape(
        DEEPSEEK_V3_2,
        ("mla_decode", "mla_prefill", "index_key_write", "index_topk", "mla_sparse"),
        (),
        {"auto": None, "fa3": "FLASH_ATTN_MLA_SPARSE", "flashmla": "FLASHMLA_SPARSE"},
        576 + 66,
        597.5,
        1853.4,
    ),
}

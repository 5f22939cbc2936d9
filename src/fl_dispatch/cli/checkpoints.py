"""Tiny checkpoints, built locally: real architectures with random weights and a word-level tokenizer.

The demonstration and the tests compare tokens, so the weights make logits differ clearly: the best token of a step
wins by more than rounding can change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCABULARY = 512
SEED = 20240607

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)

_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _qwen2() -> PretrainedConfig:
    from transformers import Qwen2Config

    return Qwen2Config(**_SHAPE, tie_word_embeddings=False)


def _qwen3() -> PretrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(**_SHAPE, tie_word_embeddings=False)


def _llama() -> PretrainedConfig:
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    return LlamaConfig(**_SHAPE, tie_word_embeddings=False, rope_parameters=rope)


def _llama_yarn() -> PretrainedConfig:
    from transformers import LlamaConfig

    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    return LlamaConfig(**_SHAPE, tie_word_embeddings=False, rope_parameters=rope)


def _phi3() -> PretrainedConfig:
    from transformers import Phi3Config

    # half of each head is rotated; up to 512 tokens by the short factors
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.25, 1.5, 2.0],
        "long_factor": [2.0, 3.0, 4.0, 8.0],
    }
    shape = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
    return Phi3Config(**shape, tie_word_embeddings=False, original_max_position_embeddings=512, rope_parameters=rope)


def _gemma2() -> PretrainedConfig:
    from transformers import Gemma2Config

    return Gemma2Config(
        **_SHAPE,
        tie_word_embeddings=True,  # vLLM supports only this
        sliding_window=32,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=200.0,
        hidden_act="gelu_pytorch_tanh",  # SGLang reads it, as in the published checkpoints
    )


def _bloom() -> PretrainedConfig:
    from transformers import BloomConfig

    # ALiBi instead of rotary positions; the embeddings are tied, as vLLM assumes
    shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 3, "n_head": 4}
    return BloomConfig(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=0)


_LATENT: Mapping[str, Any] = {
    **{name: value for name, value in _SHAPE.items() if name not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "tie_word_embeddings": False,
    # one dense layer, then experts in groups
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_layer_freq": 1,
}


_LATENT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
}


def _deepseek_v2() -> PretrainedConfig:
    from transformers import DeepseekV2Config

    routing = {"topk_method": "group_limited_greedy", "scoring_func": "softmax"}
    return DeepseekV2Config(
        **_LATENT, q_lora_rank=None, **routing, routed_scaling_factor=2.0, rope_parameters=dict(_LATENT_ROPE)
    )


def _deepseek_v3() -> PretrainedConfig:
    from transformers import DeepseekV3Config

    routing = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # vLLM reads them, as in the published checkpoints
    rope = dict(_LATENT_ROPE)
    return DeepseekV3Config(**_LATENT, **routing, q_lora_rank=24, num_mtp_layers=0, rope_parameters=rope)


_SPARSE: Mapping[str, Any] = {
    **_LATENT,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "q_lora_rank": 24,
    # fewer listed tokens than a prompt has, to reveal a wrong list
    "index_topk": 20,
    "index_n_heads": 8,
    "index_head_dim": 32,
}


def _deepseek_v32() -> PretrainedConfig:
    from transformers import DeepseekV32Config

    return DeepseekV32Config(**_SPARSE, rope_parameters=dict(_LATENT_ROPE))


def _glm_moe_dsa() -> PretrainedConfig:
    """The last layer shares the lists of the layer before it, as in GLM-5.2."""
    from transformers import GlmMoeDsaConfig

    indexing = {"indexer_rope_interleave": True, "index_topk_freq": 2, "index_skip_topk_offset": 2}
    return GlmMoeDsaConfig(**_SPARSE, **indexing, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


_EXPERTS: Mapping[str, Any] = {
    **_SHAPE,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def _qwen3_moe() -> PretrainedConfig:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**_EXPERTS, num_experts=8)  # every layer has experts: SGLang ignores mlp_only_layers


def _mixtral() -> PretrainedConfig:
    from transformers import MixtralConfig

    return MixtralConfig(**_SHAPE, tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2)


def _minimax_m2() -> PretrainedConfig:
    from transformers import MiniMaxM2Config

    # sigmoid scores with a bias for the choice; half of each head is rotated
    routing = {"scoring_func": "sigmoid", "use_routing_bias": True}
    norms = {"use_qk_norm": True, "qk_norm_type": "per_layer"}  # SGLang reads them, as in the published checkpoints
    return MiniMaxM2Config(
        **_SHAPE,
        **routing,
        **norms,
        rotary_dim=8,
        tie_word_embeddings=False,
        num_local_experts=8,
        num_experts_per_tok=3,
    )


def _glm4_moe() -> PretrainedConfig:
    from transformers import Glm4MoeConfig

    # a dense layer, then experts in four groups, chosen with a bias, and a shared one
    return Glm4MoeConfig(
        **_EXPERTS,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
    )


def _gemma3() -> PretrainedConfig:
    from transformers import Gemma3TextConfig

    # six layers: five with a sliding window, one with full attention
    shape = {**_SHAPE, "num_hidden_layers": 6}
    return Gemma3TextConfig(**shape, sliding_window=32, query_pre_attn_scalar=16, tie_word_embeddings=False)


FAMILIES: Mapping[str, Callable[[], PretrainedConfig]] = {
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "llama": _llama,
    "llama_yarn": _llama_yarn,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "bloom": _bloom,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "minimax_m2": _minimax_m2,
    "glm4_moe": _glm4_moe,
}
"""Model family → its configuration."""


_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system")
_ENGLISH = """
the a an and or but of to in on at by for from with without over under runs run river sea sun moon star sky wind
rain snow stone tree leaf root wood hill road door house room table chair book page word line letter number zero one
two three four five six seven eight nine ten chip core clock wire board memory cache tensor kernel operator layer
model token policy vendor reference fast slow small large light dark red green blue white black hot cold new old
good bad first last next only every some many few all none is are was were has have had can will does do not yes no
who what where when why how hello world day night time year hand eye ear head heart bird fish dog cat horse bread
water salt milk fire
"""


def _words() -> list[str]:
    """Return special tokens, common words, and invented words that fill the vocabulary."""
    syllables = ["ba", "de", "fi", "go", "ku", "la", "mo", "ne", "pi", "ru", "sa", "to", "vu", "we", "xi", "zo"]
    made_up = (first + second + end for end in ("n", "r", "l") for first in syllables for second in syllables)
    return list(islice(dict.fromkeys((*_SPECIAL, *_ENGLISH.split(), *made_up)), VOCABULARY))


def build_tokenizer(path: Path) -> None:
    """Write a tokenizer in which every word is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(_words())}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(path)


def build_checkpoint(family: str, path: str | Path, **changes: Any) -> Path:
    """Write a checkpoint of one of :data:`FAMILIES` with its tokenizer, in float32 and identical at every call.

    Args:
        family: a key of :data:`FAMILIES`.
        path: the folder to write to.
        changes: attributes of the configuration that differ from the family's, such as ``head_dim=32``.

    Raises:
        ValueError: the family is unknown.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown model family '{family}'; known: {', '.join(FAMILIES)}")
    config = FAMILIES[family]()
    config.update(changes)
    return write_checkpoint(config, Path(path))


def write_checkpoint(config: PretrainedConfig, target: Path) -> Path:
    """Write a checkpoint of a configuration with random weights, as :func:`build_checkpoint` does."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        routing = (found for found in model.named_buffers() if found[0].endswith("e_score_correction_bias"))
        for name, weight in sorted((*model.named_parameters(), *routing), key=itemgetter(0)):
            _fill(name, weight, config.tie_word_embeddings)
    model.generation_config.do_sample = False
    model.save_pretrained(target)
    build_tokenizer(target)
    return target


FINAL_NORMS = (
    "model.norm.weight",
    "transformer.ln_f.weight",
    "gpt_neox.final_layer_norm.weight",
    "model.final_layernorm.weight",
    "model.decoder.final_layer_norm.weight",
    "backbone.norm_f.weight",
    "model.norm_f.weight",
    "model.embedding_norm.weight",
)


def _fill(name: str, parameter: Any, tied: bool) -> None:
    """Fill a parameter with random weights that keep activations near one and spread the logits.

    Tied embeddings are small, so that the layers, rather than the last token's own embedding, decide on the next token.
    """
    import torch

    with torch.no_grad():
        if name in FINAL_NORMS:
            parameter.fill_(10.0)  # spreads the logits
        elif "norm" in name or ".ln_1" in name or ".ln_2" in name:
            parameter.add_(0.2 * torch.randn_like(parameter))
            if "embed" in name:
                parameter.mul_(0.1)
        elif name.endswith("A_log"):
            parameter.uniform_(-5.0, 0.5)  # some heads remember hundreds of tokens, some a few
        elif "embed" in name or "lm_head" in name:
            parameter.normal_(0.0, 0.01 if tied else 1.0)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)

"""Tiny checkpoints, built locally: real architectures with random weights and a word-level tokenizer.

The demonstration and the tests compare tokens, so the weights make logits differ clearly: the best token of a step
wins by more than rounding can change.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
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
    "tie_word_embeddings": False,
}
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
_LATENT: Mapping[str, Any] = {
    **{name: value for name, value in _SHAPE.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # one dense layer, then experts in groups
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_layer_freq": 1,
    "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
}
_V3: Mapping[str, Any] = {
    **_LATENT,
    "q_lora_rank": 24,
    # vLLM reads them, as in the published checkpoints
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_SPARSE: Mapping[str, Any] = {
    **_V3,
    # fewer listed tokens than a prompt has, to reveal a wrong list
    "index_topk": 20,
    "index_n_heads": 8,
    "index_head_dim": 32,
}
_EXPERTS: Mapping[str, Any] = {
    **_SHAPE,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_LLAMA3: Mapping[str, Any] = {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_PHI3: Mapping[str, Any] = {
    # half of each head is rotated; up to 512 tokens by the short factors
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 8.0],
}
_GEMMA2: Mapping[str, Any] = {
    **_SHAPE,
    "tie_word_embeddings": True,  # vLLM supports only this
    "sliding_window": 32,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 200.0,
    "hidden_act": "gelu_pytorch_tanh",  # SGLang reads it, as in the published checkpoints
}
_BLOOM: Mapping[str, Any] = {
    # ALiBi instead of rotary positions; the embeddings are tied, as vLLM assumes
    **{name: value for name, value in _SHAPE.items() if name in ("vocab_size", "hidden_size") or "token" in name},
    "n_layer": 3,
    "n_head": 4,
}
_GLM_5: Mapping[str, Any] = {
    # the last layer shares the lists of the layer before it, as in GLM-5.2
    **_SPARSE,
    "indexer_rope_interleave": True,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_MINIMAX_M2: Mapping[str, Any] = {
    # sigmoid scores with a bias for the choice; half of each head is rotated
    **_SHAPE,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    # SGLang reads both, as in the published checkpoints
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "rotary_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
}
_GLM_4: Mapping[str, Any] = {
    # a dense layer, then experts in four groups, chosen with a bias, and a shared one
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
}
_V2_ROUTING = {"topk_method": "group_limited_greedy", "scoring_func": "softmax", "routed_scaling_factor": 2.0}
# six layers: five with a sliding window, one with full attention
_WINDOWS = {"num_hidden_layers": 6, "sliding_window": 32, "query_pre_attn_scalar": 16}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2": ("Qwen2Config", _SHAPE),
    "qwen3": ("Qwen3Config", _SHAPE),
    "llama": ("LlamaConfig", {**_SHAPE, "rope_parameters": _LLAMA3}),
    "llama_yarn": ("LlamaConfig", {**_SHAPE, "rope_parameters": _YARN}),
    "phi3": (
        "Phi3Config",
        {
            **{name: value for name, value in _SHAPE.items() if name != "head_dim"},
            "original_max_position_embeddings": 512,
            "rope_parameters": _PHI3,
        },
    ),
    "gemma2": ("Gemma2Config", _GEMMA2),
    "gemma3": ("Gemma3TextConfig", {**_SHAPE, **_WINDOWS}),
    "bloom": ("BloomConfig", _BLOOM),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, **_V2_ROUTING, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", {**_V3, "num_mtp_layers": 0}),
    "deepseek_v32": ("DeepseekV32Config", _SPARSE),
    "glm_moe_dsa": ("GlmMoeDsaConfig", _GLM_5),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 8}),  # in each layer: SGLang ignores mlp_only_layers
    "mixtral": ("MixtralConfig", {**_SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax_m2": ("MiniMaxM2Config", _MINIMAX_M2),
    "glm4_moe": ("Glm4MoeConfig", _GLM_4),
}
"""Model family → the class of its configuration in transformers, and the fields."""


def configuration(family: str) -> PretrainedConfig:
    """Return the configuration of one of :data:`FAMILIES`."""
    import transformers

    name, fields = FAMILIES[family]
    made: PretrainedConfig = getattr(transformers, name)(**deepcopy(fields))  # transformers changes what it is given
    return made


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
    config = configuration(family)
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

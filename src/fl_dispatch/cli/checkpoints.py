"""Tiny checkpoints, built locally: real architectures with random weights and a word-level tokenizer.

They are for the demonstration and for tests that compare tokens, so their logits are made to differ clearly: the best
token of a step wins by more than rounding can move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
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


def _gemma3() -> PretrainedConfig:
    from transformers import Gemma3TextConfig

    # six layers: five with a sliding window, one with full attention
    shape = {**_SHAPE, "num_hidden_layers": 6}
    return Gemma3TextConfig(**shape, sliding_window=32, query_pre_attn_scalar=16, tie_word_embeddings=False)


FAMILIES: Mapping[str, Callable[[], PretrainedConfig]] = {"qwen3": _qwen3, "llama": _llama, "gemma3": _gemma3}
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
    """Special tokens, common words, and made-up ones that fill the vocabulary."""
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


def build_checkpoint(family: str, path: str | Path) -> Path:
    """Write a checkpoint of one of :data:`FAMILIES` with its tokenizer, in float32, the same at every call.

    Raises:
        ValueError: an unknown family.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if family not in FAMILIES:
        raise ValueError(f"unknown model family '{family}'; known: {', '.join(FAMILIES)}")
    config = FAMILIES[family]()
    target = Path(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in sorted(model.named_parameters()):
            _fill(name, parameter)
    model.generation_config.do_sample = False
    model.save_pretrained(target)
    build_tokenizer(target)
    return target


def _fill(name: str, parameter: Any) -> None:
    """Random weights that keep activations near one, and a wide end, so that logits lie far apart."""
    import torch

    with torch.no_grad():
        if name == "model.norm.weight":
            parameter.fill_(10.0)  # spreads the logits
        elif "norm" in name:
            parameter.add_(0.2 * torch.randn_like(parameter))
        elif "embed" in name or "lm_head" in name:
            parameter.normal_(0.0, 1.0)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)

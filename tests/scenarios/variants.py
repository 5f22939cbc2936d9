"""Variants of the small checkpoints: another tokenizer, other weights, adapters, an encoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fl_dispatch.cli.checkpoints import VOCABULARY

WEIGHTS = "model.safetensors"
RANK, ALPHA = 4, 8
ADAPTED = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def changed(model: Path, target: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """Write a copy of a checkpoint in which ``change(name, tensor)`` replaces every tensor."""
    shutil.copytree(model, target)
    tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(model / WEIGHTS).items()}
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target


def other_weights(model: Path, target: Path, seed: int = 11) -> Path:
    """Write a checkpoint with other matrices of the same shape and statistics."""
    generator = torch.Generator().manual_seed(seed)
    return changed(
        model,
        target,
        lambda name, tensor: (
            tensor if "norm" in name else torch.randn(tensor.shape, generator=generator) * tensor.std()
        ),
    )


def unsure(model: Path, target: Path, apart: float = 0.02) -> Path:
    """Write a checkpoint with logits closer by this factor, so that completions vary enough to learn from."""
    return changed(model, target, lambda name, tensor: tensor * apart if name == "model.norm.weight" else tensor)


def with_characters(model: Path, target: Path, unnamed: int = 0) -> Path:
    """Write a copy with every byte in its tokenizer, as structured output needs, and fewer of the last ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(model, target)
    specials = ["<pad>", "<s>", "</s>", "<unk>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*specials, *letters]
    tokens += [f"never-{index}" for index in range(VOCABULARY - unnamed - len(tokens))]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), specials, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(target)
    return target


def adapter(model: Path, target: Path, seed: int, adapted: tuple[str, ...] = ADAPTED) -> Path:
    """Write a LoRA adapter of all projections, in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if module.endswith(adapted):
            rows, columns = weight.shape
            down = torch.randn(RANK, columns, generator=generator) * columns**-0.5
            up = torch.randn(rows, RANK, generator=generator) * 0.5
            tensors |= {
                f"base_model.model.{module}.lora_A.weight": down,
                f"base_model.model.{module}.lora_B.weight": up,
            }
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [module.rpartition(".")[2] for module in adapted],
        "base_model_name_or_path": str(model),
    }
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


def merged(model: Path, adapter_folder: Path, target: Path) -> Path:
    """Write the checkpoint with an adapter's products added to its weights: ``W + alpha / r * B A``."""
    factors = load_file(adapter_folder / "adapter_model.safetensors")

    def add(name: str, weight: Tensor) -> Tensor:
        module = "base_model.model." + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in factors:
            return weight
        return weight + ALPHA / RANK * factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]

    return changed(model, target, add)


def encoder(target: Path, kind: str = "BertModel", **changes: object) -> Path:
    """Write a small encoder of one of Transformers' BERT classes with random weights and the word-level tokenizer."""
    import transformers

    from fl_dispatch.cli.checkpoints import build_tokenizer

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=160,
        max_position_embeddings=512,
        **changes,
    )
    options = {"add_pooling_layer": False} if kind == "BertModel" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = getattr(transformers, kind)(config, **options)
        for name, parameter in model.named_parameters():
            if "LayerNorm" not in name:
                parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(target)
    build_tokenizer(target)
    return target


def classifier(model: Path, target: Path, labels: int) -> Path:
    """Write a small Qwen3 with a head that chooses among labels by the last token."""
    shutil.copytree(model, target)
    tensors = load_file(model / WEIGHTS)
    tensors.pop("lm_head.weight")
    generator = torch.Generator().manual_seed(9)
    hidden = tensors["model.norm.weight"].shape[0]
    tensors["score.weight"] = 0.02 * torch.randn(labels, hidden, generator=generator)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    names = {"id2label": {str(index): f"label {index}" for index in range(labels)}}
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": labels, **names}
    config["label2id"] = {name: int(index) for index, name in names["id2label"].items()}
    (target / "config.json").write_text(json.dumps(config))
    return target


def said(model: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Add tensors to a folder's checkpoint, and fields to its configuration; return the folder."""
    path, weights = model / "config.json", model / WEIGHTS
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    save_file({**load_file(weights), **tensors}, weights, metadata={"format": "pt"})
    return model

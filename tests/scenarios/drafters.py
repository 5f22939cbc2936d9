"""Draft models for the small checkpoints, with right drafts wherever the target repeats a token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from running import PROMPTS
from variants import WEIGHTS, changed, said, unsure

NOISE = 0.02


def noisy(model: Path, target: Path) -> Path:
    """Write the same model with some noise in its matrices; most of its tokens are the model's."""
    generator = torch.Generator().manual_seed(3)

    def add(name: str, tensor: Tensor) -> Tensor:
        if "norm" in name:
            return tensor
        return tensor + NOISE * tensor.std() * torch.randn(tensor.shape, generator=generator)

    return changed(model, target, add)


def _silent(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor for a layer that adds nothing: its last projections of attention and feed-forward are zero."""
    return torch.zeros_like(tensor) if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor


def _second_half(size: int) -> Tensor:
    """Return a matrix ``[size, 2 * size]`` that drops the embedding and keeps the hidden state after it."""
    return torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1)


def _write(target: Path, model: Path, tensors: dict[str, Tensor], **changes: object) -> Path:
    target.mkdir(exist_ok=True)
    config = {**json.loads((model / "config.json").read_text()), **changes}
    (target / "config.json").write_text(json.dumps(config))
    kept = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(kept, target / WEIGHTS, metadata={"format": "pt"})
    return target


def _layer(tensors: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{number}."
    return {
        name.removeprefix(prefix): _silent(name, tensor) for name, tensor in tensors.items() if name.startswith(prefix)
    }


def eagle(model: Path, target: Path) -> Path:
    """Write an EAGLE head for a Llama that passes on the target's hidden state; the target's head computes logits."""
    tensors = load_file(model / WEIGHTS)
    size = tensors["model.norm.weight"].shape[0]
    layer = {
        f"layers.0.{name}": tensor for name, tensor in _layer(tensors, 0).items() if name != "input_layernorm.weight"
    }
    rest = {"embed_tokens.weight": tensors["model.embed_tokens.weight"], "fc.weight": _second_half(size)}
    return _write(target, model, {**layer, **rest}, num_hidden_layers=1)


def eagle3(model: Path, target: Path) -> Path:
    """Write an EAGLE-3 head for a Llama: one of three hidden states, the target's norm, and the target's head."""
    tensors = load_file(model / WEIGHTS)
    norm, embeddings = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    size = norm.shape[0]
    layer = _layer(tensors, 0)
    for name in "qkv":  # inputs: the embedding and the hidden state
        layer[f"self_attn.{name}_proj.weight"] = layer[f"self_attn.{name}_proj.weight"].repeat(1, 2)
    layer["hidden_norm.weight"] = torch.ones(size)
    first = torch.cat([torch.eye(size), torch.zeros(size, 2 * size)], dim=1)
    rest = {"fc.weight": first, "norm.weight": norm, "lm_head.weight": tensors["lm_head.weight"]}
    whole = {
        **{f"midlayer.{name}": tensor for name, tensor in layer.items()},
        **rest,
        "embed_tokens.weight": embeddings,
    }
    return _write(target, model, whole, num_hidden_layers=1, architectures=["LlamaForCausalLMEagle3"])


def _predictors(layer: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return equal layers that follow a model's own three."""
    return {f"model.layers.{3 + index}.{name}": tensor for index in range(count) for name, tensor in layer.items()}


def with_mtp(model: Path, target: Path, predictors: int = 1) -> Path:
    """Write a DeepSeek-V3 with layers that each predict one more token; Hugging Face's class does not load them."""
    tensors = load_file(model / WEIGHTS)
    norm = tensors["model.norm.weight"]
    size = norm.shape[0]
    layer = {
        **_layer(tensors, 2),
        "enorm.weight": torch.ones(size),
        "hnorm.weight": torch.ones(size),
        "eh_proj.weight": _second_half(size),
        "shared_head.norm.weight": norm,
        "shared_head.head.weight": tensors["lm_head.weight"],
        "embed_tokens.weight": tensors["model.embed_tokens.weight"],
    }
    further = _predictors(layer, predictors)
    shutil.copytree(model, target)
    return _write(target, model, {**tensors, **further}, num_nextn_predict_layers=predictors)


LISTING, HEED = 1, 5.0
"""A layer with experts and its own indexer in the families with sparse latent attention; the factor of its attention's
output in :func:`with_reader`.
"""


def with_reader(model: Path, target: Path, predictors: int = 1) -> Path:
    """Write a model with sparse latent attention and one active layer, and predictors that are copies of that layer.

    A predictor ignores the model's hidden state and reads the tokens, without the very first one. So it repeats the
    model's computation, and a draft is right if both layers list and attend to the same tokens.
    """
    tensors = load_file(model / WEIGHTS)
    embeddings = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = embeddings = embeddings / embeddings.square().mean(-1, keepdim=True).sqrt()
    prefix, size = f"model.layers.{LISTING}.", embeddings.shape[1]
    tensors[f"{prefix}self_attn.o_proj.weight"] *= HEED
    layer = {
        **{name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)},
        "enorm.weight": torch.ones(size),
        "hnorm.weight": torch.ones(size),
        "eh_proj.weight": _second_half(size).roll(size, 1),
        "shared_head.norm.weight": tensors["model.norm.weight"],
        "shared_head.head.weight": tensors["lm_head.weight"],
        "embed_tokens.weight": embeddings,
    }
    silent = {name: tensor if name.startswith(prefix) else _silent(name, tensor) for name, tensor in tensors.items()}
    further = _predictors(layer, predictors)
    shutil.copytree(model, target)
    return _write(target, model, {**silent, **further}, num_nextn_predict_layers=predictors)


def with_mtp_beside_states(model: Path, target: Path) -> Path:
    """Write a Qwen3.5 with a layer that predicts one more token; its norms add one to their weights."""
    tensors = load_file(model / WEIGHTS)
    size = tensors["model.norm.weight"].shape[0]
    norms = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
    further = {
        **{f"layers.0.{name}": tensor for name, tensor in _layer(tensors, 1).items()},
        **{name: torch.zeros(size) for name in norms},
        "fc.weight": _second_half(size),
    }
    shutil.copytree(model, target)
    return _write(target, model, {**tensors, **{f"mtp.{name}": tensor for name, tensor in further.items()}})


LAYERS_READ = [0, 1, 2]
"""Layers that a head reads in a model of four layers; SGLang's own choice needs seven."""


def eagle3_beside_states(model: Path, llama: Path, target: Path) -> Path:
    """Write SGLang's EAGLE-3 head for a Qwen3-Next, with a layer of a Llama; Qwen's norm adds one to its weight."""
    tensors = load_file(model / WEIGHTS)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    own = {name.removeprefix("model."): tensors[name] for name in names}
    norm = 1 + tensors["model.norm.weight"]
    size = len(norm)
    last = torch.cat([torch.zeros(size, 2 * size), torch.eye(size)], dim=1)
    read = {"eagle_aux_hidden_state_layer_ids": LAYERS_READ}
    head = {**own, "norm.weight": norm, "fc.weight": last}
    return said(eagle3(llama, target), head, draft_vocab_size=None, eagle_config=read)


REPEATED, UNSURE = 0.3, 0.02
"""Share of the embedding in the head, so that a model repeats about half of its tokens; scale of the logits.
"""


def repeating(model: Path, target: Path) -> Path:
    """Write a model with a head that sometimes repeats tokens and has close logits, so that drafts are accepted."""
    tensors = load_file(model / WEIGHTS)
    (embeddings,) = (
        tensor for name, tensor in tensors.items() if name.endswith(("embed_tokens.weight", "embeddings.weight"))
    )

    def change(name: str, tensor: Tensor) -> Tensor:
        if name != "lm_head.weight":
            return tensor
        return UNSURE * (tensor + REPEATED * embeddings * (tensor.std() / embeddings.std()))

    return changed(model, target, change)


TARGETS = {
    "draft_model": "qwen3",
    "eagle": "llama",
    "eagle3": "llama",
    "mtp": "deepseek_v3",
    "several predictors": "deepseek_v3",
}
"""Drafter → the family of its target."""
METHODS = {"several predictors": "mtp"}
"""vLLM's name of a drafting method, if it differs."""
TURNS = [prompt[:6] * 4 for prompt in PROMPTS[:3]]
LONG = 48
"""Prompts with repetitions, and the number of tokens of their answers."""


def pairs(checkpoint: Callable[[str], Path], folder: Path) -> dict[str, tuple[Path, Path]]:
    """Return drafter → the target, which has the tokens of its family's checkpoint, and the draft model."""
    made = {name: unsure(checkpoint(name), folder / name) for name in {*TARGETS.values()}}
    qwen, llama = made["qwen3"], made["llama"]
    predicting = with_mtp(made["deepseek_v3"], folder / "mtp")
    several = with_mtp(made["deepseek_v3"], folder / "several", 3)
    return {
        "draft_model": (qwen, noisy(qwen, folder / "noisy")),
        "eagle": (llama, eagle(llama, folder / "eagle")),
        "eagle3": (llama, eagle3(llama, folder / "eagle3")),
        "mtp": (predicting, predicting),
        "several predictors": (several, several),
    }


def under_sglang(checkpoint: Callable[[str], Path], folder: Path) -> dict[str, tuple[Path, Path | None]]:
    """Return the same for SGLang, with its names in the heads' configurations; ``ngram`` has no draft model."""
    found = pairs(checkpoint, folder)
    (llama, head), (_, third) = found["eagle"], found["eagle3"]
    size = json.loads((llama / "config.json").read_text())["hidden_size"]
    said(head, {"fc.bias": torch.zeros(size)}, architectures=["LlamaForCausalLMEagle"])
    said(third, {}, draft_vocab_size=None)
    return {**found, "ngram": (found["draft_model"][0], None)}


def continued(network: Any, text: list[int], count: int) -> list[int]:
    """Return the tokens that a network chooses next."""
    found = list(text)
    with torch.no_grad():
        for _ in range(count):
            found.append(int(network(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(text) :]


def drafted(drafter: Any, text: list[int], answer: list[int], best: int = 1) -> int:
    """Return how many first tokens of an answer are among the drafter's best ones."""
    with torch.no_grad():
        for place, token in enumerate(answer):
            logits = drafter(torch.tensor([[*text, *answer[:place]]])).logits[0, -1]
            if token not in logits.topk(best).indices:
                return place
    return len(answer)


def accepted(
    target: Any, right: Callable[[list[int], list[int]], int], prompt: list[int], count: int, width: int
) -> list[int]:
    """Return how many tokens of each draft are accepted until an answer has ``count`` tokens.

    Args:
        target: the network; it chooses its best tokens.
        right: a text and its next tokens → how many of these are drafted.
        prompt: the request; its own step gives the answer's first token.
        count: number of tokens of the answer.
        width: number of tokens in a draft.
    """
    text, found = [*prompt, *continued(target, prompt, count + width)], list[int]()
    while (done := len(prompt) + 1 + sum(found) + len(found)) < len(prompt) + count:
        found.append(right(text[:done], text[done : done + width]))
    return found


TOP, TEMPERATURE = 3, 2.0
"""Number of best tokens, and temperature, of sampled steps."""


def check_pairs(network: Any, prompt: list[int], sampled: list[list[int]]) -> None:
    """Check that each pair's share of samples is within five standard deviations of the network's probability."""
    first = _best(network, prompt)
    assert max(first.values()) < 0.9
    pairs = {
        (one, other): chance * next_chance
        for one, chance in first.items()
        for other, next_chance in _best(network, [*prompt, one]).items()
    }
    expected = torch.tensor(list(pairs.values()))
    found = (torch.tensor(sampled)[:, None] == torch.tensor(list(pairs))).all(-1).float().mean(0)
    assert torch.isclose(found.sum(), torch.tensor(1.0))
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / len(sampled)).sqrt()).all(), found.tolist()


def _best(network: Any, prompt: list[int]) -> dict[int, float]:
    """Return the possible next tokens, and the probability of each."""
    with torch.no_grad():
        best = (network(torch.tensor([prompt])).logits[0, -1] / TEMPERATURE).topk(TOP)
    return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

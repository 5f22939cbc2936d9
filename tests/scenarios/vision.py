"""Small multimodal models with random weights, pictures, and the expected text about each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from fl_dispatch.cli.checkpoints import SEED
from variants import WEIGHTS

SIZE = 32
"""Pixels per side of a picture."""
TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_QWEN_IDS = {"image_token_id": 6, "video_token_id": 7, "vision_start_token_id": 4, "vision_end_token_id": 5}
SPECIALS = ("<pad>", "<s>", "</s>", "<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def pictures(size: int = SIZE) -> list[Any]:
    """Return two pictures: one dark at one end, and bright noise."""
    from PIL import Image

    side = np.arange(size) * 2
    gradient = np.stack([np.tile(side, (size, 1)), np.tile(side[:, None], (1, size)), np.full((size, size), 9)], -1)
    noise = np.random.default_rng(3).integers(120, 256, (size, size, 3))
    return [Image.fromarray(each.astype(np.uint8)) for each in (gradient, noise)]


def _tokenizer() -> Any:
    """Build a tokenizer with every byte and the placeholders of pictures."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    extra = {"additional_special_tokens": list(SPECIALS[3:])}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **extra)


def _llava(tokenizer: Any) -> tuple[Any, Any]:
    from transformers import CLIPImageProcessor, LlamaConfig, LlavaConfig, LlavaProcessor

    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    seen = {**vision, "model_type": "clip_vision_model", "image_size": SIZE, "patch_size": 8}
    text = LlamaConfig(vocab_size=len(tokenizer), **TEXT)
    config = LlavaConfig(vision_config=seen, text_config=text, image_token_id=3, tie_word_embeddings=False)
    sizes = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
    processor = LlavaProcessor(
        CLIPImageProcessor(**sizes), tokenizer, patch_size=8, vision_feature_select_strategy="default",
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    return config, processor


def qwen(version: str, patch: int = SIZE // 8) -> Callable[[Any], tuple[Any, Any]]:
    """Return the configuration of a version of Qwen-VL, with eight patches per side of a picture."""

    def made(tokenizer: Any) -> tuple[Any, Any]:
        import transformers

        of = {"2": "Qwen2VL", "2.5": "Qwen2_5_VL"}[version]
        rope = {"mrope_section": [2, 3, 3], "rope_type": "default", "rope_theta": 10000.0}
        text = {**TEXT, "vocab_size": len(tokenizer), "rope_parameters": rope}
        seen = {
            "2": {
                "embed_dim": 64, "hidden_size": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 2, "patch_size": patch,
            },
            "2.5": {
                "hidden_size": 64, "out_hidden_size": 64, "depth": 2, "num_heads": 4, "intermediate_size": 128,
                "patch_size": patch, "window_size": 4 * patch, "fullatt_block_indexes": [1],
            },
        }[version]  # fmt: skip
        config = getattr(transformers, f"{of}Config")(
            text_config=text, vision_config=seen, tie_word_embeddings=False, **_QWEN_IDS
        )
        size = (8 * patch) ** 2
        pixels = {"patch_size": patch, "min_pixels": size, "max_pixels": size}
        images = transformers.Qwen2VLImageProcessor(**pixels)
        videos = transformers.Qwen2VLVideoProcessor(**pixels)
        return config, getattr(transformers, f"{of}Processor")(images, tokenizer, videos)

    return made


def _hybrid(of: str, **mlp: Any) -> Callable[[Any], tuple[Any, Any]]:
    """Return the configuration of Qwen3.5: a gated delta net, attention, and the encoder of Qwen3-VL."""

    def made(tokenizer: Any) -> tuple[Any, Any]:
        import transformers

        rope = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
        text = {
            **TEXT, **mlp, "vocab_size": len(tokenizer), "head_dim": 16,
            "num_hidden_layers": 4, "layer_types": 2 * ["linear_attention", "full_attention"],
            "rope_parameters": {**rope, "rope_type": "default", "rope_theta": 10000.0},
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        }  # fmt: skip
        seen = {
            "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 4,
            "patch_size": 4, "num_position_embeddings": 16,
        }  # fmt: skip
        config = getattr(transformers, f"{of}Config")(
            text_config=text, vision_config=seen, tie_word_embeddings=False, **_QWEN_IDS
        )
        pixels = {"patch_size": 4, "min_pixels": SIZE * SIZE, "max_pixels": SIZE * SIZE}
        images = transformers.Qwen2VLImageProcessor(**pixels)
        videos = transformers.Qwen3VLVideoProcessor(patch_size=4)
        return config, transformers.Qwen3VLProcessor(images, tokenizer, videos)

    return made


KINDS: Mapping[str, Callable[[Any], tuple[Any, Any]]] = {
    "llava": _llava,
    "qwen2_vl": qwen("2"),
    "qwen2_5_vl": qwen("2.5"),
    "qwen3_5": _hybrid("Qwen3_5"),
    "qwen3_5_moe": _hybrid(
        "Qwen3_5Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
    ),
}
_SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
HYBRID = {"qwen3_5", "qwen3_5_moe"}
"""Models with a gated delta net, which have only Gemma's norms."""
IMAGES = {kind: "<image>" if kind == "llava" else _SEEN for kind in KINDS}
"""The placeholders of a picture."""
WITHOUT = "b and what is in the left corner, and what in the right one?"
"""A prompt without a picture that is longer than a block; states make blocks large."""
PROMPTS = {kind: ("<s>a" if kind == "llava" else "a") + IMAGES[kind] + WITHOUT for kind in KINDS}
ENCODERS = {kind: ("vision_tower.*", 1) if kind == "llava" else ("visual.*", 2) for kind in KINDS}
"""Prefix of the encoder's layers, and the number of those with attention; LLaVA omits its encoder's last layer."""


def template(kind: str) -> str:
    """Return a chat template that joins the parts to a prompt."""
    part = "{% if part.type == 'text' %}{{ part.text }}{% else %}IMAGE{% endif %}".replace("IMAGE", IMAGES[kind])
    return "{% for message in messages %}{% for part in message.content %}" + part + "{% endfor %}{% endfor %}"


def build(kind: str, target: Path, made: Callable[[Any], tuple[Any, Any]] | None = None) -> Path:
    """Write the checkpoint of a kind, or of a variant of it."""
    import torch
    from transformers import AutoModelForImageTextToText

    config, processor = (made or KINDS[kind])(_tokenizer())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForImageTextToText.from_config(config)
        for name, parameter in model.named_parameters():
            if "norm" not in name and "ln_q" not in name:
                parameter.data.normal_(0.0, 1.5 * parameter[0].numel() ** -0.5)
            if "visual" in name and "merger" not in name and parameter.dim() > 1:
                parameter.data *= 4  # otherwise all pictures give the same answer
    model.save_pretrained(target)
    processor.save_pretrained(target)
    if kind == "llava":
        tensors = load_file(target / WEIGHTS).items()
        published = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors}
        save_file(published, target / WEIGHTS, metadata={"format": "pt"})
    return target


def expected(model: Path, kind: str, tokens: int, size: int = SIZE) -> list[list[int]]:
    """Return Hugging Face's greedy tokens for each picture, and for the prompt without one."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    network = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    network.generation_config.eos_token_id = None  # the engines ignore it
    processor = AutoProcessor.from_pretrained(model)
    asked = [{"text": PROMPTS[kind], "images": picture} for picture in pictures(size)] + [{"text": WITHOUT}]
    found = []
    for ask in asked:
        inputs = processor(return_tensors="pt", **ask)
        with torch.no_grad():
            output = network.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        found.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return found

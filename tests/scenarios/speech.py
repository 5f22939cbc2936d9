"""A small Whisper with random weights for two seconds of sound, and its expected text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fl_dispatch.cli.checkpoints import SEED

RATE, SECONDS = 16000, 2
FRAMES = 100 * SECONDS
"""Frames of a spectrum; the encoder makes one token of two frames."""
FIRST = "<|startoftranscript|>"


def build(target: Path) -> Path:
    """Write the checkpoint, with a tokenizer of every byte."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    words = ["<|endoftext|>", FIRST, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = WhisperTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": [FIRST]})
    config = WhisperConfig(
        vocab_size=len(words),
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=FRAMES // 2,
        max_target_positions=128,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = WhisperForConditionalGeneration(config)
        for name, parameter in model.named_parameters():
            if "layer_norm" not in name:
                parameter.data.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    model.save_pretrained(target)
    extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=SECONDS, sampling_rate=RATE)
    WhisperProcessor(extractor, tokenizer).save_pretrained(target)
    return target


def sounds() -> list[list[float]]:
    """Return two sounds of different length: a rising tone, and noise."""
    seconds = np.arange(SECONDS * RATE) / RATE
    noise = np.random.default_rng(3).normal(0.0, 0.3, RATE)
    return [np.sin(2 * np.pi * (200 + 300 * seconds) * seconds).tolist(), noise.tolist()]


def expected(model: Path, sound: list[float], tokens: int) -> list[int]:
    """Return Hugging Face's greedy tokens for a sound."""
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    extractor = WhisperFeatureExtractor.from_pretrained(model)
    network: Any = WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    features = extractor(np.array(sound), sampling_rate=RATE, return_tensors="pt").input_features
    written = [1]
    with torch.no_grad():
        for _ in range(tokens):
            logits = network(input_features=features, decoder_input_ids=torch.tensor([written])).logits[0, -1]
            written.append(int(logits.argmax()))
    return written[1:]

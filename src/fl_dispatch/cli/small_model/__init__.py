"""A real language model of 1.2 million parameters, its held-out text, and the model's perplexity on that text.

``tools/train_small_model.py`` makes the files from English that ships with Python; ``NOTICE.md`` in this folder has
the licence and the facts. The weights are bfloat16, so float32 and bfloat16 engines compute with the same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CHECKPOINT = FOLDER / "checkpoint"
"""A checkpoint in Hugging Face's format: ``config.json``, ``model.safetensors``, ``tokenizer.json``."""
HELD_OUT = FOLDER / "held_out.txt"
"""Text that the model was not trained on."""
PROMPTS = ("The function returns a list of", "If the file does not exist,", "This module provides")
"""Prompts that the model can continue."""
WINDOW = 256
"""Tokens in a row of the held-out text."""
NAME = "small"
"""The name of this model on command lines."""


def facts() -> dict[str, Any]:
    """Return Hugging Face's ``perplexity`` in float32 over ``tokens`` in rows of ``window``, and training facts."""
    found: dict[str, Any] = json.loads((FOLDER / "facts.json").read_text(encoding="utf-8"))
    return found

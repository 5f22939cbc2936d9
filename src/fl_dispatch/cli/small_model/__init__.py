"""A real language model of 1.2 million parameters, its held-out text, and the perplexity that it should have there.

``tools/train_small_model.py`` makes the files from English that ships with Python; ``NOTICE.md`` beside this file has
the licence and the facts. The weights are bfloat16, so float32 and bfloat16 engines compute with the same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CHECKPOINT = FOLDER / "checkpoint"
"""A checkpoint as Hugging Face's: ``config.json``, ``model.safetensors``, ``tokenizer.json``."""
HELD_OUT = FOLDER / "held_out.txt"
"""Text that the model was not trained on."""
PROMPTS = ("The function returns a list of", "If the file does not exist,", "This module provides")
"""Beginnings that the model can go on with."""
WINDOW = 256
"""Tokens of a row of the held-out text."""
NAME = "small"
"""The name of this model on command lines."""


def facts() -> dict[str, Any]:
    """``perplexity`` in float32 by Hugging Face's model, over ``tokens`` in rows of ``window``; how it was trained."""
    found: dict[str, Any] = json.loads((FOLDER / "facts.json").read_text(encoding="utf-8"))
    return found

"""Prompts as tokens: lines of a file by the model's tokenizer, or generated for the model's vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import DispatchError, text_of
from ...evidence.bisect.prompts import FORCED, generated

LONGEST = 4096
"""Largest number of tokens of a generated or read prompt."""


def made(model: str) -> list[list[int]]:
    """Generate prompts for the model's vocabulary.

    Raises:
        DispatchError: the checkpoint has no configuration that Hugging Face knows.
    """
    config = _config(model)
    return generated(config.vocab_size, _longest(config))


def read(file: Path, model: str) -> list[list[int]]:
    """Return the tokens of a file's lines.

    Raises:
        DispatchError: the file cannot be read or is empty, a line is too long, or the model has no tokenizer.
    """
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DispatchError(f"--prompts {file} cannot be read: {error}") from error
    if not lines:
        raise DispatchError(f"--prompts {file} holds no prompt; one a line is needed")
    longest = _longest(_config(model))
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # Transformers and its libraries raise many types
        raise DispatchError(f"{model} has no tokenizer for --prompts: {text_of(error)}") from error
    found = [list(tokenizer(line).input_ids) for line in lines]
    for number, tokens in enumerate(found, start=1):
        if not 2 <= len(tokens) <= longest:
            raise DispatchError(f"--prompts {file}: prompt {number} has {len(tokens)} tokens; from 2 to {longest} fit")
    return found


def _config(model: str) -> Any:
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(model)
    except Exception as error:  # as above
        raise DispatchError(f"--model {model}: its configuration cannot be read: {text_of(error)}") from error
    return config.get_text_config()


def _longest(config: Any) -> int:
    return min(LONGEST, int(getattr(config, "max_position_embeddings", LONGEST))) - FORCED

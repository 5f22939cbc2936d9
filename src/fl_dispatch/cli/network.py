"""Hugging Face's network of a checkpoint, from the files that an engine reads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ..hosting.loading.files import unread_by_engines


def network(model: str | Path, dtype: Any) -> Any:
    """Load a network in ``dtype`` with Hugging Face's eager attention, for comparisons with an engine.

    If a folder has both ``model.safetensors`` and an index of other files, Hugging Face would load the former. Both
    hosts load the indexed files, and this function does the same.
    """
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="fl-") as without:
        if (unread := unread_by_engines(model)) is not None:
            for file in unread.parent.iterdir():
                if file.name != unread.name:
                    Path(without, file.name).symlink_to(file.resolve())
            model = without
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager").eval()

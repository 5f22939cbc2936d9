"""The files of a checkpoint: the file of each tensor, the files that a host reads, and a head besides the embedding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...logger_manager import get_logger

logger = get_logger(__name__)

SINGLE = "model.safetensors"
"""The file of a checkpoint's weights."""
INDEX = "model.safetensors.index.json"
"""The list of files of a checkpoint with several."""
HEAD = r"(.*\.)?lm_head\.weight"
EMBEDDING = r"(.*\.)?(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight"
"""Names of the head, and of the embedding to which it may be tied."""


def files_by_name(files: Iterable[str]) -> dict[str, str]:
    """Return tensor → its safetensors file."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    for file in files:
        if file.endswith(".safetensors"):
            with safe_open(file, "pt") as opened:
                found.update(dict.fromkeys(opened.keys(), file))
    return found


def read(file: str, name: str) -> Tensor:
    """Return a tensor of a safetensors file."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        values: Tensor = opened.get_tensor(name)
    return values


def head_of_its_own(files: Iterable[str]) -> str | None:
    """Return the name of the files' head if they have exactly one that is not the embedding."""
    by_name = files_by_name(files)
    heads = [name for name in by_name if re.fullmatch(HEAD, name)]
    embeddings = [name for name in by_name if re.fullmatch(EMBEDDING, name)]
    if len(heads) != 1 or len(embeddings) != 1:
        return None
    head, embedding = (read(by_name[name], name) for name in (*heads, *embeddings))
    return None if torch.equal(head, embedding) else heads[0]


def warn_of_unread(files: Sequence[str]) -> None:
    """Log if the folder has weights that Hugging Face would load and a host, which read ``files``, did not."""
    folders = {Path(file).parent for file in files}
    for folder in folders:
        if (unread := unread_by_engines(folder)) is not None and str(unread) not in map(str, files):
            logger.warning(
                "%s has two sets of weights: the engine serves the files of %s, and Hugging Face's from_pretrained "
                "would load %s; delete one of them, unless they are the same",
                folder, INDEX, SINGLE,
            )  # fmt: skip


def unread_by_engines(folder: str | Path) -> Path | None:
    """Return the ``model.safetensors`` of a folder with an index of other files, which hosts read, or ``None``."""
    index, single = Path(folder, INDEX), Path(folder, SINGLE)
    if not (index.is_file() and single.is_file()):
        return None
    named = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
    return None if SINGLE in named else single

"""Check that a checkpoint's tensors and the model's parameters match, except for leftovers that SGLang allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from fl_dispatch.hosting.loading import allowed as rules
from fl_dispatch.hosting.loading.account import Account
from fl_dispatch.hosting.loading.allowed import Allowed
from fl_dispatch.hosting.loading.files import head_of_its_own, warn_of_unread
from fl_dispatch.hosting.loading.refusals import left_over, naming, refuse_left, refuse_unfilled
from fl_dispatch.hosting.ranks import agreement
from fl_dispatch.logger_manager import get_logger

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = get_logger(__name__)

SHAPE = Allowed(r".*\.weight_shape", "the packed weight has the shape itself")
"""The tensor of ``compressed-tensors`` with a weight's shape, and the parameter of the same name."""
UNFILLED = (
    SHAPE,
    Allowed(r".*\.position_ids", "positions are counted"),
    Allowed(rf".*{re.escape(rules.COLUMNS)}", "GPTQ's columns are in their order where a file says nothing"),
    Allowed(r"model\.layers\.\d+\.[qk]_norm\.weight", "SGLang's class of Falcon-H1 has norms that it never calls"),
    Allowed(r".*\.[kv]_scale", "scales of a KV cache are 1 where a checkpoint has none, and SGLang says so"),
)
"""Parameters and buffers of SGLang's models that a checkpoint may lack."""
UNTAKEN = (
    *rules.UNTAKEN,
    SHAPE,
    Allowed(r".*\.(q|prob)_scale", "SGLang quantizes no queries"),
)
"""Tensors of a checkpoint that SGLang's models may ignore."""


def untie(runner: ModelRunner) -> None:
    """Make SGLang create a separate head if a tied model's file has one that differs from the embedding.

    Hugging Face and vLLM then serve the file's head; SGLang's models follow only the configuration, and drop it.
    """
    model, args = runner.model_config, runner.server_args
    configs = [config for config in (model.hf_config, model.hf_text_config) if getattr(config, TIED, False)]
    if not configs or runner.is_draft_worker or args.load_format not in ("auto", "safetensors"):
        return
    loader = DefaultModelLoader(LoadConfig(load_format=args.load_format, download_dir=args.download_dir))
    files = loader._prepare_weights(model.model_path, model.revision, fall_back_to_pt=True)[1]
    if (head := head_of_its_own(files)) is not None:
        logger.warning(
            "config.json of %s ties the head to the embedding, and the file has another head, '%s', which is "
            "served; 'tie_word_embeddings': false says so in config.json",
            model.model_path,
            head,
        )
        for config in configs:
            setattr(config, TIED, False)


TIED = "tie_word_embeddings"
"""The field of a configuration that says whether the head is the embedding."""


class Load:
    """One load of a runner's model at start, from its beginning to its account."""

    def __init__(self, source: str, drafts: bool, quantized: bool, unfilled: tuple[Allowed, ...]) -> None:
        self.source, self.drafts, self.quantized, self.unfilled = source, drafts, quantized, unfilled
        self.account: Account | None = None


_LOAD = ContextVar[Load | None]("fl_load", default=None)
"""The load in progress. Weights loaded later into a running engine are not counted."""


@contextmanager
def loads(runner: ModelRunner) -> Iterator[None]:
    """Let SGLang make and load a runner's model in this block; at the end every rank compares the leftover tensors.

    Raises:
        CheckpointError: a tensor of the checkpoint is left over on every rank.
    """
    config = runner.model_config
    unfilled = (*UNFILLED, *rules.shared_caches(config.hf_text_config))
    load = Load(str(config.model_path), runner.is_draft_worker, config.quantization is not None, unfilled)
    token = _LOAD.set(load)
    try:
        yield
    finally:
        _LOAD.reset(token)
    if (account := load.account) is None or load.drafts or not config.is_generation:
        return  # pooling models take only the layers of their task
    left, parallel = left_over(account, UNTAKEN, config), get_parallel()
    if parallel.world_group.world_size > 1:
        left = agreement.on_all(parallel.world_group.cpu_group, left)
    refuse_left(account, left)


def is_of_target() -> bool:
    """Whether a model that answers, not one that drafts, is loaded for the first time."""
    load = _LOAD.get()
    return load is not None and not load.drafts


def load_weights_only(
    original: Callable[..., None], model: nn.Module, weights: Iterable[tuple[str, Tensor]], target_device: Any
) -> None:
    """Let SGLang load a model, then refuse parameters that the checkpoint did not fill.

    Raises:
        CheckpointError: a parameter is not filled, or a tensor has another kind of numbers.
    """
    load = _LOAD.get()
    if load is None:
        original(model, weights, target_device)
        return
    account = load.account = Account(model, load.source, load.quantized)
    with naming(account), account.watching():
        original(model, account.see(weights), target_device)
    refuse_unfilled(account, model, (*load.unfilled, *(rules.OF_TARGET if load.drafts else ())))
    warn_of_unread(account.files)


def note_files(original: Callable[..., tuple[str, list[str], bool]], loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Record SGLang's choice of a checkpoint's files."""
    found = original(loader, *args, **kwargs)
    if (load := _LOAD.get()) is not None and load.account is not None:
        load.account.files += found[1]
    return found

"""Rotations of a loaded model: tables as the configuration states them, and LongRoPE's table chosen per request.

LongRoPE has a table for texts up to the original length and one for longer texts. SGLang chooses for each step by its
positions, so a prompt that is read in parts, or a growing text, would use both. Here a request uses one table from its
first token to its last, chosen by the length that it may reach. Positions of requests with the second table are shifted
past the first table, so a position is a row of the concatenated tables. Their cached prefixes are kept apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fl_dispatch.hosting.layers.attribute import Attached
from fl_dispatch.hosting.positions import configurations, rotary_tables
from fl_dispatch.logger_manager import get_logger

from ..bridge.rotary_embedding import LongRopeBridge
from ..version import TESTED_HOSTS, host_version
from .classes import BRIDGE, is_called

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = get_logger(__name__)

SPLIT = Attached[int]("fl_long_rope_split")
"""Rows of a model runner's first table, if requests choose their table."""
SHIFTED = Attached[Tensor]("fl_shifted_positions")
"""A batch's positions as table rows."""
SECOND = "longrope"
"""Mark in the keys of cached prefixes with the second table, which separates them from the others."""
_second: WeakValueDictionary[str, Req] = WeakValueDictionary()
"""Requests with the second table, by their names."""


def without_scaling(
    original: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool,
    rope_scaling: Any,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> Any:
    """Return the rotation of latent attention on a CPU, because SGLang's class lacks unscaled tables."""
    of_all = head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor
    if rope_scaling is not None:
        return original(*of_all, device)
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(*of_all)


def prepare(runner: ModelRunner) -> None:
    """Correct the tables of a loaded model, and let requests choose between LongRoPE's tables."""
    model, config, length = runner.model, stated(runner), runner.model_config.context_len
    rotary_tables.correct(_with(model, "cos_sin_cache"), config, length)
    long = [*_with(model, "long_short_cos_sin_cache")]
    rotary_tables.correct_long(long, config, length)
    bridges = [BRIDGE.find(layer) for _, layer in long]
    splits = {layer.original_max_position_embeddings for _, layer in long}
    if not long or length <= min(splits):
        return
    if len(splits) > 1 or not all(isinstance(bridge, LongRopeBridge) for bridge in bridges):
        logger.warning("LongRoPE stays with SGLang's own code, which turns a prompt of several steps by both tables")
        return
    if host_version() not in TESTED_HOSTS:
        logger.warning(
            "LongRoPE under SGLang %s turns a prompt of several steps by both tables; give --context-length %d to have "
            "the first one alone",
            *(host_version(), *splits),
        )
        return
    for bridge in bridges:
        assert isinstance(bridge, LongRopeBridge)
        bridge.by_request = True
    SPLIT.give(runner, *splits)


def stated(runner: ModelRunner) -> Any:
    """Return the text model's configuration as Transformers reads it, unless the user has changed it."""
    model = runner.model_config
    overridden = runner.server_args.json_model_override_args not in ("", "{}")
    if overridden:
        return model.hf_text_config
    return configurations.as_transformers_reads(model.hf_text_config, model.model_path, model.revision)


def _with(model: nn.Module, table: str) -> Iterator[tuple[str, Any]]:
    """Yield layers that the model calls with a table starting at position 0, once for each prefix."""
    for prefix, layer in model.named_modules(remove_duplicate=False):
        found = getattr(layer, table, None)
        from_zero = isinstance(found, Tensor) and found.ndim == 2 and not getattr(layer, "position_start", 0)
        if from_zero and is_called(model, prefix):
            yield prefix, layer


def choose(original: Callable[..., Any], scheduler: Scheduler, req: Req) -> Any:
    """Limit a request's new tokens as SGLang does, then choose its table by the length that it may reach."""
    result = original(scheduler, req)
    split = SPLIT.find(scheduler.tp_worker.model_runner)
    # the last new token is never read
    reach = len(req.origin_input_ids) + max(1, req.sampling_params.max_new_tokens) - 1
    if split is not None and reach > split and req.rid not in _second:
        _second[req.rid] = req
        req.extra_key = SECOND if req.extra_key is None else f"{req.extra_key}|{SECOND}"
    return result


def shift(runner: ModelRunner, batch: ForwardBatch) -> None:
    """Convert a batch's positions to rows, before SGLang's forward pass."""
    split, names = SPLIT.find(runner), batch.rids
    if split is None or not names or batch.positions is None or SHIFTED.find(batch) is batch.positions:
        return
    chosen = [split * (name in _second) for name in names]
    if not any(chosen):
        return
    positions = batch.positions
    moves = torch.tensor(chosen, dtype=positions.dtype, device=positions.device)
    mode = batch.forward_mode
    if mode.is_extend() and not mode.is_target_verify() and batch.extend_seq_lens_cpu is not None:
        counts = torch.tensor(list(batch.extend_seq_lens_cpu), device=positions.device)
        moves = moves.repeat_interleave(counts)
    elif positions.shape[0] > len(names):
        moves = moves.repeat_interleave(positions.shape[0] // len(names))
    rows = positions.clone()
    rows[: moves.shape[0]] += moves  # the rest is padding
    batch.positions = rows
    SHIFTED.give(batch, rows)

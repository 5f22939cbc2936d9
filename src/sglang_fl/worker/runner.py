"""Hooks of SGLang's model runner in a worker: after its model is loaded, and after its first forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_parallel

from fl_dispatch import get_default_manager
from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.records import runs
from fl_dispatch.hosting.start import aten, oplist, tactics
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from .. import checkpoint, report
from ..attention import attention_layers, pools
from ..compat import hooks, state_forms
from ..compat.runtime import hosts_own_attention, largest_step
from ..graphs import product_warm_up
from ..layers import classes, first_pass, rotations
from ..platform import refusals
from ..ranks import communicator
from ..runner_state import LOADED, LoadedModel
from ..version import host_version
from . import damage

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = get_logger(__name__)


def load_model(original: Callable[..., Any], runner: ModelRunner, *args: Any, **kwargs: Any) -> Any:
    """Start the core, let SGLang load, then bind every layer and compare the ranks."""
    hooks.refuse_unhooked()
    refusals.check_model(runner, detect_device())
    settings, manager = get_settings(), get_default_manager()
    state_forms.keep_model_type(runner.model_config.dtype)
    pools.choose(runner.page_size, hosts_own_attention())
    manager.ensure_initialized()
    checkpoint.untie(runner)
    with checkpoint.loads(runner):
        result = original(runner, *args, **kwargs)
    classes.warn_of_unknown_names(settings)
    survey = classes.prepare(runner.model)
    attention_layers.give_windows(runner.model, rotations.stated(runner), hosts_own_attention())
    rotations.prepare(runner)
    product_warm_up.keep_forms(runner.model)
    LOADED.give(runner, LoadedModel(survey))
    logger.info("%s", survey.describe())
    survey.refuse_native_run(settings)
    here = get_parallel()
    several = here.tp_size * here.pp_size > 1
    aten.replace(settings, detect_device())
    tactics.begin()
    communicator.check_ranks()
    oplist.record(manager, settings, here.tp_rank if several else None)
    _write_record(runner, {})
    return result


@runs.ending()
def forward(
    original: Callable[..., Any], runner: ModelRunner, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
) -> Any:
    """Run SGLang's forward pass; the first one with a batch that is not empty ends the start."""
    loaded = LOADED.of(runner)
    rotations.shift(runner, forward_batch)
    if loaded.served or forward_batch.forward_mode.is_idle():
        return damage.without_damaged_drafts(runner, original(runner, forward_batch, *args, **kwargs))
    unseen = loaded.undispatched is None
    result = first_pass.watched(runner, lambda: original(runner, forward_batch, *args, **kwargs))
    loaded.served = True
    aten.seal()
    if get_parallel().attn_dp_size == 1:  # otherwise a rank may have had no batch
        communicator.agree_on_tactics()
    _write_record(runner, first_pass.missed(runner))
    if unseen:
        first_pass.judge(first_pass.missed(runner), get_settings().policy.strict)
    return damage.without_damaged_drafts(runner, result)


def _write_record(runner: ModelRunner, undispatched: dict[str, list[str]]) -> None:
    """Write the record for commands and ``/metrics``, for the served model only, not its draft model."""
    if runner.is_draft_worker:
        return
    model, survey = runner.server_args.model_path, LOADED.of(runner).survey
    host = f"SGLang {host_version()}"
    runs.record(host, model, survey, undispatched, report.own_rank(), sizes=_sizes(runner))


def _sizes(runner: ModelRunner) -> runs.Sizes | None:
    """Return the sizes of its steps, once SGLang has found how many requests fit."""
    requests = getattr(runner, "max_running_requests", None)
    if requests is None:
        return None
    tokens = largest_step()
    dtype = str(runner.dtype).removeprefix("torch.")
    return runs.Sizes(dtype, get_parallel().tp_size, requests, tokens, eager=report.graphs_of(runner) is None)

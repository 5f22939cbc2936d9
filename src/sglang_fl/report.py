"""Questions to the scheduler processes of a running ``sglang.Engine``.

SGLang's ``Engine.collective_rpc`` calls a method of every scheduler and returns nothing, so the answers are files.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_dispatch import get_default_manager
from fl_dispatch.hosting.records.report import dispatch_report

from .bridge import fallen_through
from .runner_state import LOADED, PROMPT_GRAPHS

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

PATIENCE = 60.0
"""Seconds that ranks have for an answer."""


# -- in a scheduler process -------------------------------------------------------------------------------------------


def own_rank() -> int:
    """Return this process's number among the ranks of all pipeline stages and data-parallel replicas."""
    from sglang.srt.runtime_context import get_parallel

    here = get_parallel()
    replica = (here.dp_rank or 0) // here.attn_dp_size  # ranks that attend for their own requests are part of tp_size
    return int(here.tp_rank + here.tp_size * (here.pp_rank + here.pp_size * replica))


def graphs_of(runner: ModelRunner) -> dict[str, Any] | None:
    """Return batch sizes of a model runner's captured decode graphs, and the number of steps that replayed one."""
    found: Any = getattr(runner, "decode_cuda_graph_runner", None)
    if not getattr(found, "fl_captured", False):
        return None
    return {"requests": list(found.capture_bs), "replays": found.fl_replays}


def graphs_of_prompts(runner: ModelRunner) -> dict[str, Any] | None:
    """Return the numbers of tokens of a model runner's prompt graphs, and the number of steps that replayed one."""
    found: Any = getattr(runner, "prefill_cuda_graph_runner", None)
    graphs = None if found is None else PROMPT_GRAPHS.find(found)
    if graphs is None or not graphs.captured:
        return None
    return {"tokens": list(found.capture_num_tokens), "replays": graphs.replays}


def _drafter(worker: Any) -> dict[str, Any] | None:
    """Return the draft model's layers, and those its first pass missed; ``None`` without a draft model."""
    for runner in () if worker is None else worker._draft_model_runners():
        loaded = LOADED.of(runner)
        return {**loaded.survey.as_data(), "undispatched": loaded.undispatched}
    return None


def worker_report(runner: ModelRunner) -> dict[str, Any]:
    """Return the report of this process: the core's part, and the plugin's knowledge of the model.

    ``layers`` and ``native_layers`` are class name → number of layers that run a bridge, and SGLang's own code.
    ``fallen_through`` is ``"class: reason"`` → calls. ``graphs`` has the batch sizes of decode graphs, and the number
    of steps that replayed one, ``None`` without graphs; ``prompt_graphs`` has the same for prompts, with numbers of
    tokens. ``undispatched`` is operator → layers that the first pass missed, ``None`` before it.
    """
    loaded = LOADED.of(runner)
    return {
        "rank": own_rank(),
        **dispatch_report(),
        **loaded.survey.as_data(),
        "attention_backend": type(runner.attn_backend).__name__,
        "graphs": graphs_of(runner),
        "prompt_graphs": graphs_of_prompts(runner),
        "fallen_through": {f"{name}: {reason}": calls for (name, reason), calls in fallen_through.items()},
        "undispatched": loaded.undispatched,
    }


def fl_report(scheduler: Scheduler, folder: str) -> None:
    """Write :func:`worker_report` to this rank's own file in an existing folder.

    ``drafter`` has a draft model's layers, and those its first pass missed. ``steps`` maps a number of steps to the
    decode batches that made that number per scheduler call; it is ``None`` without ``VLLM_FL_STEPS``.
    """
    data = worker_report(scheduler.tp_worker.model_runner)
    worker = getattr(scheduler, "draft_worker", None)
    data["drafter"], data["steps"] = _drafter(worker), getattr(worker, "made", None)
    part = Path(folder, f"{data['rank']}.part")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.rename(part.with_suffix(".json"))


def fl_set_counting(scheduler: Scheduler, on: bool = True) -> None:
    """Count calls from now on, starting at zero, or stop."""
    manager = get_default_manager()
    manager.set_counting(on)
    manager.reset_counts()


SCHEDULER_METHODS = (fl_report, fl_set_counting)


# -- in the process that has the engine -------------------------------------------------------------------------------


def collect(engine: Engine) -> list[dict[str, Any]]:
    """Return the :func:`worker_report` of every rank, in order.

    Raises:
        RuntimeError: a rank did not answer within :data:`PATIENCE` seconds, or the engine has data-parallel ranks.
    """
    _refuse_data_parallel(engine)
    ranks = engine.server_args.tp_size * engine.server_args.pp_size
    with tempfile.TemporaryDirectory(prefix="fl-report-") as folder:
        engine.collective_rpc("fl_report", folder=folder)  # waits for the first pipeline stage; the others come later
        answers, late = [Path(folder, f"{rank}.json") for rank in range(ranks)], time.monotonic() + PATIENCE
        while not all(answer.exists() for answer in answers):
            if time.monotonic() > late:
                silent = [answer.stem for answer in answers if not answer.exists()]
                raise RuntimeError(f"no report came from rank {', '.join(silent)} of {ranks}")
            time.sleep(0.01)
        return [json.loads(answer.read_text(encoding="utf-8")) for answer in answers]


def set_counting(engine: Engine, on: bool = True) -> None:
    """Start or stop counting calls in every rank.

    Raises:
        RuntimeError: the engine has data-parallel ranks.
    """
    _refuse_data_parallel(engine)
    engine.collective_rpc("fl_set_counting", on=on)


def _refuse_data_parallel(engine: Engine) -> None:
    """Raise, because SGLang connects no scheduler of a data-parallel engine to ``collective_rpc``, which would hang."""
    arguments = engine.server_args
    if arguments.dp_size > 1 or getattr(arguments, "attn_dp_size", 1) > 1:  # the second place, as of 0.5.23
        raise RuntimeError("SGLang collects no reports from a data-parallel engine; fl doctor shows what its ranks ran")

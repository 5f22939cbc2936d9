"""vLLM's models of several checkpoints, loaded one after another: ``python load_models.py jobs.json result.json``.

A job is a checkpoint's folder; its result what was refused, or null, and the messages of our loggers. One process with
vLLM's loaders and our account loads them all, and serves none.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Any


class Kept(logging.Handler):
    """Messages of our loggers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def load(folder: str) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import get_world_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    from fl_dispatch.settings import get_settings
    from vllm_fl import checkpoint, quantization
    from vllm_fl.layers import classes

    kept, refused = Kept(), None
    loggers = [logging.getLogger(name) for name in ("fl_dispatch", "vllm_fl")]
    for logger in loggers:
        logger.addHandler(kept)
    try:
        config = EngineArgs(folder, max_model_len=64, enforce_eager=True, dtype="float32").create_engine_config()
        if config.model_config.quantization is not None:
            quantization.register()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}.rendezvous", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            classes.register(get_settings(), in_worker=True)
            get_model(vllm_config=config)
            checkpoint.refuse_left(config.model_config, get_world_group().cpu_group)
    except Exception as error:  # each job's outcome is the result, whatever it is
        traceback.print_exc()
        refused = f"{type(error).__name__}: {error}"
    for logger in loggers:
        logger.removeHandler(kept)
    return {"refused": refused, "messages": kept.messages}


if __name__ == "__main__":
    from vllm_fl.compat import loaders
    from vllm_fl.platform import startup

    startup.activate()
    loaders.count()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([load(folder) for folder in jobs]))

"""SGLang's models of several checkpoints, loaded one after another: ``python load_models.py jobs.json result.json``.

A job is a checkpoint's folder; its result what was refused, or null, the messages of our loggers, and the type of its
head. One process with SGLang's loader and our hooks loads them all, and serves none.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Runner:
    """As much of SGLang's model runner as a load asks for."""

    model_config: Any
    server_args: Any
    is_draft_worker: bool = False


class Kept(logging.Handler):
    """Messages of our loggers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _arguments(folder: str) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path=folder, skip_tokenizer_init=True, device="cpu", dtype="float32")


def start(folder: str) -> None:
    """SGLang as in a scheduler process, with one rank."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish

    load_plugins()
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.moe.utils import initialize_moe_config

    arguments = _arguments(folder)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"file://{folder}.rendezvous"
    )
    initialize_model_parallel()


def load(folder: str) -> dict[str, Any]:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model

    from sglang_fl import checkpoint

    arguments, kept, refused, head = _arguments(folder), Kept(), None, None
    runner = Runner(ModelConfig.from_server_args(arguments), arguments)
    logging.getLogger("sglang_fl").addHandler(kept)
    logging.getLogger("fl_dispatch").addHandler(kept)
    try:
        checkpoint.untie(runner)
        with checkpoint.loads(runner):
            model = get_model(
                model_config=runner.model_config, load_config=LoadConfig(), device_config=DeviceConfig("cpu")
            )
        head = type(model.lm_head).__name__
    except Exception as error:  # each job's outcome is the result, whatever it is
        traceback.print_exc()
        refused = f"{type(error).__name__}: {error}"
    logging.getLogger("sglang_fl").removeHandler(kept)
    logging.getLogger("fl_dispatch").removeHandler(kept)
    return {"refused": refused, "messages": kept.messages, "head": head}


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    start(jobs[0])
    Path(sys.argv[2]).write_text(json.dumps([load(folder) for folder in jobs]))

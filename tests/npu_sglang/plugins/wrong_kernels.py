"""A method for SGLang's scheduler, which ``Engine.collective_rpc`` calls: the wrong kernel from now on."""

from __future__ import annotations

import os
from typing import Any

from fl_dispatch import OpRegistry


def set_wrong_kernel(scheduler: Any, name: str) -> None:
    os.environ["EMU_NPU_WRONG"] = name  # read at each call of a kernel


def register_builtins(registry: OpRegistry) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.set_wrong_kernel = set_wrong_kernel

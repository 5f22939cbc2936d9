"""A method for SGLang's scheduler, which ``Engine.collective_rpc`` calls: another policy, while it serves."""

from __future__ import annotations

from typing import Any

from fl_dispatch import OpRegistry, SelectionPolicy, set_global_policy


def set_policy(scheduler: Any, policy: dict[str, Any]) -> None:
    set_global_policy(SelectionPolicy.from_dict(**policy))


def register_builtins(registry: OpRegistry) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.set_policy = set_policy

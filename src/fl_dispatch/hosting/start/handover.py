"""Pass a process's settings and policy to child processes that a host starts without calling the plugin.

They travel in one environment variable, with the number of the process that wrote it. A direct child takes them over if
its variables equal that process's, and writes its own for its children. Any other process that inherits the variable
ignores it, for example a program that was started with other settings.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

from ...errors import ConfigError
from ...global_policy import GLOBAL
from ...logger_manager import get_logger
from ...policy import get_policy, set_global_policy
from ...settings import Settings, get_settings, install_settings, variable_names

logger = get_logger(__name__)

VARIABLE = "FL_DISPATCH_HANDOVER"


def pack() -> dict[str, str]:
    """Return the settings of this process as text, with the current global policy in place of theirs."""
    if get_policy() != GLOBAL.get():
        logger.warning(
            "a policy context is open, but the engine may live in other processes: it runs the global policy"
        )
    return {"settings": _held().to_json()}


def _held() -> Settings:
    return replace(get_settings(), policy=GLOBAL.get())


def take_over(packed: dict[str, str]) -> None:
    """Install another process's :func:`pack`; equal settings and policies change nothing."""
    mine = _held()
    if "settings" not in packed or packed["settings"] == mine.to_json():
        return
    theirs = install_settings(Settings.from_json(packed["settings"]))
    if theirs.policy.to_json() != mine.policy.to_json():  # the origins count, too
        set_global_policy(theirs.policy)


def _variables() -> dict[str, str]:
    """Return the variables of this process from which settings are read."""
    names = {name for name in os.environ if name.startswith(("VLLM_FL_", "SGLANG_FL_"))} | set(variable_names())
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def offer() -> None:
    """Leave this process's settings and policy for its children, replacing earlier ones."""
    os.environ[VARIABLE] = json.dumps({"pid": os.getpid(), "variables": _variables(), **pack()})


def adopt() -> None:
    """Take over the parent process's settings, if it left some, and leave the same for this process's children.

    Raises:
        ConfigError: the variable was not written by :func:`offer`.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    try:
        packed = json.loads(text)
        parent, variables = packed.pop("pid"), packed.pop("variables")
        if not isinstance(parent, int) or packed.keys() != {"settings"}:
            raise ValueError("keys differ")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"environment variable {VARIABLE}", None, f"is written by a parent process only, not by users: {error}"
        ) from error
    if parent != os.getppid():
        return
    if variables == _variables():
        take_over(packed)
        offer()
    else:
        logger.warning(
            "settings of the parent process %d are not taken over: this one has variables of its own", parent
        )

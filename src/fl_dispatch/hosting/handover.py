"""Settings and policy of a process, for the child processes that a host starts without asking us.

They travel in one environment variable that names the process that wrote it. Only a direct child takes them over, and
writes its own for its children; any other process that inherits the variable ignores it.
"""

from __future__ import annotations

import json
import os

from ..errors import ConfigError
from ..logger_manager import get_logger
from ..policy import PolicyManager, SelectionPolicy, get_policy, set_global_policy
from ..settings import Settings, get_settings, install_settings

logger = get_logger(__name__)

VARIABLE = "FL_DISPATCH_HANDOVER"


def pack() -> dict[str, str]:
    """Settings and policy of this process as text."""
    policy = PolicyManager.get_instance().get_global_policy()
    if get_policy() != policy:
        logger.warning(
            "a policy context is open, but the engine may live in other processes: it runs the global policy"
        )
    return {"settings": get_settings().to_json(), "policy": policy.to_json()}


def take_over(packed: dict[str, str]) -> None:
    """Install what :func:`pack` gave in another process; equal settings and policies change nothing."""
    if "settings" in packed and packed["settings"] != get_settings().to_json():
        install_settings(Settings.from_json(packed["settings"]))
    mine = PolicyManager.get_instance().get_global_policy().to_json()
    if "policy" in packed and packed["policy"] != mine:
        set_global_policy(SelectionPolicy.from_json(packed["policy"]))


def offer() -> None:
    """Leave this process's settings and policy for its children. Called again, it replaces what was left before."""
    os.environ[VARIABLE] = json.dumps({"pid": os.getpid(), **pack()})


def adopt() -> None:
    """Take over what the parent process left, if it left anything, and leave the same for this process's children.

    Raises:
        ConfigError: the variable was not written by :func:`offer`.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    try:
        packed = json.loads(text)
        parent = packed.pop("pid")
        if not isinstance(parent, int) or packed.keys() != {"settings", "policy"}:
            raise ValueError("keys differ")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"environment variable {VARIABLE}", None, f"is written by a parent process and by nobody else: {error}"
        ) from error
    if parent == os.getppid():
        take_over(packed)
        offer()

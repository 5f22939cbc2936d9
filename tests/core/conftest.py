"""Every test starts with no settings of the user, a fresh default manager, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fl_dispatch import clear_discovered_plugins, reset_default_manager, reset_global_policy
from fl_dispatch.ops import Operator
from fl_dispatch.ops.results import broken_promise, flat

OUR_VARIABLES = (
    "VLLM_FL_",
    "SGLANG_FL_",
    "USE_FLAGGEMS",
    "FLAGCX_PATH",
    "FLAGGEMS_ENABLE_OPLIST_PATH",
    "VLLM_BATCH_INVARIANT",
    "VLLM_LOGGING_LEVEL",
)


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(OUR_VARIABLES):
            monkeypatch.delenv(name)
    reset_global_policy()
    reset_default_manager()
    yield
    monkeypatch.undo()
    reset_global_policy()
    reset_default_manager()
    clear_discovered_plugins()


@pytest.fixture
def results_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of who runs, whose implementations return a mark instead of what is declared; tensors are compared."""

    def compared(operator: Operator, args: tuple[Any, ...], result: Any) -> str:
        has_mark = any(not isinstance(one, torch.Tensor | None) for one in flat(result))
        return "" if has_mark else broken_promise(operator, args, result)

    monkeypatch.setattr("fl_dispatch.run.recovery.broken_promise", compared)

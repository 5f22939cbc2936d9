"""Load models that were compiled as one graph from vLLM's cache.

vLLM saves them like models split into pieces, but finishes the loading of each by a method that only pieces have. So on
its own CPU platform, where one graph is the default, every start compiles again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from fl_dispatch.hosting.layers.attribute import replaced

NAME = "_try_load_aot_compiled_fn"


def load() -> None:
    """Make vLLM load such models. Idempotent."""
    from vllm.compilation import decorators

    hosts = getattr(decorators, NAME)
    if not hasattr(hosts, "__wrapped__"):
        setattr(decorators, NAME, _loading(hosts))


def _loading(hosts: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    @wraps(hosts)
    def loaded(model: Any, path: str) -> Any:
        with replaced(torch.compiler, load_compiled_function=_finished(torch.compiler.load_compiled_function)):
            return hosts(model, path)

    return loaded


def _finished(pytorchs: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's loader of a compiled function, with the method that vLLM calls afterwards."""

    @wraps(pytorchs)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        model = pytorchs(*args, **kwargs)
        graph = model._artifacts.compiled_fn
        if not hasattr(graph, "finalize_loading"):
            graph.finalize_loading = lambda vllm_config: None  # PyTorch has loaded all of it
        return model

    return loaded

"""Requests that arrive while an engine's thread makes steps, and requests that stream calls of tools.

vLLM receives a request in a separate thread, and its engine sees it at the next scheduler call. A worker in the same
process asks here whether to end its steps earlier.

Some of vLLM's parsers send broken calls of tools if a piece of a stream has several tokens. Only the server knows
which streams are parsed, so it marks the sampling parameters. A server for tokens marks streams that ``vllm launch
render`` prepared, because that process parses them and need not have this plugin.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

ENGINE = "vllm.v1.engine.core"
SERVED = {
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest",
    "vllm.entrypoints.openai.responses.protocol": "ResponsesRequest",
}
"""Module → its class of requests, which may name tools."""
TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.serving"
TOOLS = "fl_streams_tools"
"""The key of a sampling parameter's ``extra_args`` that marks a stream with calls of tools."""

_come = False
_has_room = True


def listen() -> None:
    """Make the engine of this process record each request that it receives. Idempotent."""
    engine: Any = importlib.import_module(ENGINE).EngineCore
    take = engine.preprocess_add_request
    if hasattr(take, "__wrapped__"):
        return

    @wraps(take)
    def noted(self: Any, request: Any) -> Any:
        taken = take(self, request)
        note()
        return taken

    engine.preprocess_add_request = noted


def mark_tools() -> None:
    """Make a server mark the requests that stream calls of tools. Idempotent."""
    for module, name in SERVED.items():
        request: Any = getattr(importlib.import_module(module), name)
        if not hasattr(request.to_sampling_params, "__wrapped__"):
            request.to_sampling_params = _marking(request.to_sampling_params)
    try:
        server: Any = importlib.import_module(TOKENS).ServingTokens
    except ModuleNotFoundError as missing:  # without packages of the server no tokens are served
        if str(missing.name).partition(".")[0] == "vllm":
            raise
        return
    if not hasattr(server.serve_tokens, "__wrapped__"):
        server.serve_tokens = _marking_rendered(server.serve_tokens)


def _marking(make: Callable[..., SamplingParams]) -> Callable[..., SamplingParams]:
    """Return the method that makes a request's parameters, with the mark of streamed calls of tools."""

    @wraps(make)
    def marked(self: Any, *args: Any, **kwargs: Any) -> SamplingParams:
        sampling = make(self, *args, **kwargs)
        _mark(sampling, self.stream, self)
        return sampling

    return marked


def _marking_rendered(serve: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(serve)
    def marked(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.parse_context is not None:
            _mark(request.sampling_params, request.stream, request.parse_context)
        return serve(self, request, *args, **kwargs)

    return marked


def _mark(sampling: SamplingParams, streams: bool | None, asked: Any) -> None:
    if streams and asked.tools and asked.tool_choice != "none":
        sampling.extra_args = {**(sampling.extra_args or {}), TOOLS: True}


def streams_tools(sampling: SamplingParams) -> bool:
    """Whether a request streams calls of tools."""
    return TOOLS in (sampling.extra_args or ())


def note() -> None:
    """Record that a request has arrived."""
    global _come
    _come = True


def forget(has_room: bool) -> None:
    """Forget arrivals, because the scheduler sees them now.

    Args:
        has_room: whether another request could begin; if not, an arrival need not end the steps.
    """
    global _come, _has_room
    _come, _has_room = False, has_room


def has_come() -> bool:
    """Whether a request that could begin has arrived since the last scheduler call."""
    return _come and _has_room

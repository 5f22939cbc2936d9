"""A request that runs when vLLM's engine client ends gets an error, so that the server ends without its client."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from vllm_fl.compat import ending


def client_with(stream: RequestOutputCollector, handler: asyncio.Task[Any]) -> AsyncLLM:
    """A client without an engine, of which ``stream`` waits for outputs."""
    made = AsyncLLM.__new__(AsyncLLM)
    made.output_handler = handler
    made.output_processor = OutputProcessor(None, log_stats=False)
    made.output_processor.request_states["request"] = SimpleNamespace(queue=stream)
    return made


@pytest.mark.parametrize("in_the_loop", [True, False], ids=["in its loop", "in another thread"])
def test_a_stream_ends_with_an_error_when_its_engine_client_ends(
    in_the_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        stream = RequestOutputCollector(RequestOutputKind.DELTA, "request")
        handler = asyncio.create_task(asyncio.sleep(60))
        client, waiting = client_with(stream, handler), asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        if in_the_loop:
            client.shutdown()
        else:
            await asyncio.get_running_loop().run_in_executor(None, client.shutdown)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(waiting, 5)
        assert handler.cancelled()

    monkeypatch.setitem(sys.modules, ending.SERVERS, ModuleType(ending.SERVERS))
    for _ in range(2):
        ending.end_requests()
    asyncio.run(run())

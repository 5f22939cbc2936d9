"""An engine with several data-parallel ranks: ``python run_data_parallel.py job.json result.json``.

A job is ``{"engine": arguments of AsyncLLM, "prompts": token ids, "max_tokens": n}``. Every rank gets every prompt.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


async def main(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm import SamplingParams

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["engine"]))
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def generate(rank: int, row: int) -> list[int]:
        prompt = {"prompt_token_ids": job["prompts"][row]}
        async for output in engine.generate(prompt, sampling, f"{rank}-{row}", data_parallel_rank=rank):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def ask(method: str, *arguments: Any) -> list[Any]:
        """Every rank's answer; vLLM's own ``collective_rpc`` returns only the first one's."""
        client = engine.engine_core
        calls = [
            client._call_utility_async("collective_rpc", method, None, arguments, None, engine=core)
            for core in client.core_engines
        ]
        return [answer for (answer,) in await asyncio.gather(*calls)]

    try:
        await ask("fl_set_counting", True)
        ranks, rows = range(job["engine"]["data_parallel_size"]), range(len(job["prompts"]))
        tokens = [await asyncio.gather(*(generate(rank, row) for row in rows)) for rank in ranks]
        return {"tokens": tokens, "reports": await ask("fl_report")}
    finally:
        engine.shutdown()


if __name__ == "__main__":
    result = asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
    Path(sys.argv[2]).write_text(json.dumps(result))

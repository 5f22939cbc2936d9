"""Compiled engines in one process, one after the other: ``python run_compiled.py job.json result.json``.

A job is ``{"prompts": token ids, "max_tokens": n, "engines": {name: {"arguments": of LLM, "policy": of
SelectionPolicy.from_dict, "afterwards": a policy}}}``.
Each engine starts under its policy, and once it has answered, ``afterwards`` is tried.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any


def run(
    prompts: list[list[int]],
    max_tokens: int,
    arguments: dict[str, Any],
    policy: dict[str, Any],
    afterwards: dict[str, Any] | None = None,
) -> dict[str, Any]:
    from fl_dispatch import DispatchFrozenError, SelectionPolicy, set_global_policy
    from vllm import LLM, SamplingParams

    set_global_policy(SelectionPolicy.from_dict(**policy))
    llm = LLM(**arguments)
    llm.collective_rpc("fl_set_counting", args=(True,))
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    refusal = None
    if afterwards is not None:
        try:
            set_global_policy(SelectionPolicy.from_dict(**afterwards))
        except DispatchFrozenError as error:
            refusal = str(error)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "report": llm.collective_rpc("fl_report")[0],
        "refusal": refusal,
    }


def main(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.distributed import cleanup_dist_env_and_memory

    from fl_dispatch import thaw_dispatch

    results = {}
    for name, engine in job["engines"].items():
        thaw_dispatch()
        results[name] = run(job["prompts"], job["max_tokens"], **engine)
        gc.collect()
        cleanup_dist_env_and_memory()
    return results


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))

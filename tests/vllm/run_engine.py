"""One engine in a process of its own: ``python run_engine.py job.json result.json``.

A job is ``{"engine": arguments of LLM, "policy_before": a policy, "steps": [...]}``, a step ``{"prompts": token ids,
"max_tokens": n, "policy": a policy, "reset": whether the prefix cache is emptied before}``; a policy is the arguments
of ``SelectionPolicy.from_dict``, or null. A step's policy is set in this process, so it reaches the engine only where
the engine is in this process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    from fl_dispatch import SelectionPolicy, set_global_policy

    if job.get("policy_before") is not None:
        set_global_policy(SelectionPolicy.from_dict(**job["policy_before"]))
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    llm.collective_rpc("fl_set_counting", args=(True,))
    steps = []
    for step in job["steps"]:
        if step.get("policy") is not None:
            set_global_policy(SelectionPolicy.from_dict(**step["policy"]))
        if step.get("reset"):
            assert llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0.0, max_tokens=step["max_tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in step["prompts"]]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        steps.append(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
            }
        )
    metrics = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if "prefix_cache" in metric.name or metric.name == "vllm:num_preemptions"
    }
    reports = llm.collective_rpc("fl_report")
    return {"pid": os.getpid(), "steps": steps, "metrics": metrics, "report": reports[0], "reports": reports}


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))

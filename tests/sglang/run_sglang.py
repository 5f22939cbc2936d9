"""One engine in a process of its own: ``python run_sglang.py job.json result.json``.

A job is ``{"engine": arguments of sglang.Engine, "policy_before": a policy, "steps": [...], "doctor": bool}``, a step
``{"prompts": token ids, "max_tokens": n, "policy": a policy, "scores": bool, "load": the name and folder of an adapter,
"lora": the adapter of each prompt, "sampling": parameters beside the greedy ones}``; a policy is the arguments of
``SelectionPolicy.from_dict``, or null. ``scores`` of the result are the log-probabilities of all tokens but a text's
first, ``drafts`` how often drafts of a text were checked, and how many were right. The first policy is set in this
process before the scheduler's is started. A step's is set in the scheduler's, with an empty cache, by the plugin module
``policy_method``. A data-parallel engine reports nothing and takes no other policy; ``records`` of the result are those
that its workers left. ``doctor`` of the result is what ``fl doctor --json`` says while the engine serves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any


def _flush(engine: Any) -> None:
    """Empty the cache, once the scheduler has noticed that it is idle."""
    deadline = time.monotonic() + 30
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _doctor() -> dict[str, Any]:
    command = [Path(sys.executable).with_name("fl"), "doctor", "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
    return found


def main(job: dict[str, Any]) -> dict[str, Any]:
    from fl_dispatch import SelectionPolicy, set_global_policy

    if job.get("policy_before") is not None:
        set_global_policy(SelectionPolicy.from_dict(**job["policy_before"]))
    import sglang
    from fl_dispatch.hosting import runs
    from sglang_fl import report

    engine = sglang.Engine(**job["engine"])
    answers = engine.server_args.dp_size == 1
    if answers:
        report.set_counting(engine)
    steps = []
    for step in job["steps"]:
        if step.get("policy") is not None:
            _flush(engine)
            engine.collective_rpc("set_policy", policy=step["policy"])
        sampling = {"temperature": 0.0, "max_new_tokens": step["max_tokens"], "ignore_eos": True}
        sampling |= step.get("sampling", {})
        asked = {"return_logprob": True, "logprob_start_len": 0} if step.get("scores") else {}
        adapters = {"lora_path": step["lora"]} if "lora" in step else {}
        if "load" in step:
            engine.load_lora_adapter(*step["load"])
        outputs = engine.generate(input_ids=step["prompts"], sampling_params=sampling, **asked, **adapters)
        metas = [output["meta_info"] for output in outputs] if asked else []
        steps.append(
            {
                "scores": [
                    [score for score, *_ in (*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"])]
                    for meta in metas
                ],
                "tokens": [output["output_ids"] for output in outputs],
                "cached": [output["meta_info"]["cached_tokens"] for output in outputs],
                "drafts": [
                    [output["meta_info"].get(name, 0) for name in ("spec_verify_ct", "spec_num_correct_drafts")]
                    for output in outputs
                ],
                "ranks": [output["meta_info"].get("dp_rank") for output in outputs],
            }
        )
    reports = report.collect(engine) if answers else [None]
    records = [] if answers else [asdict(run) for run in runs.of_engine()]
    doctor = _doctor() if job.get("doctor") else None
    engine.shutdown()
    said = {"report": reports[0], "reports": reports, "records": records, "doctor": doctor}
    return {"pid": os.getpid(), "steps": steps, **said}


if __name__ == "__main__":  # SGLang starts its processes by spawning this file again
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))

"""An SGLang engine on the emulated NPU, in a process of its own: ``python run_npu_sglang.py job.json result.json``.

A job is ``{"engine": arguments of sglang.Engine, "steps": [...]}``, a step ``{"prompts": token ids, "max_tokens": n,
"wrong": the ``npu::`` operator whose kernel is wrong, with an emptied cache, "while": a file that exists during the
step, with an emptied cache, "policy": the arguments of ``SelectionPolicy.from_dict``, for the plugin module
``policy_method``, "scores": whether the result has the log-probabilities of all tokens but a text's first, and no
others}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def _flush(engine: Any) -> None:
    """Empty the cache, once the scheduler has noticed that it is idle."""
    deadline = time.monotonic() + 30
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def main(job: dict[str, Any]) -> dict[str, Any]:
    import sglang
    from fl_dispatch.cli.checkpoints import VOCABULARY
    from sglang_fl import report

    engine = sglang.Engine(**job["engine"])
    report.set_counting(engine)
    steps = []
    for step in job["steps"]:
        if step.keys() & {"wrong", "while", "policy"}:
            _flush(engine)
        if "policy" in step:
            engine.collective_rpc("set_policy", policy=step["policy"])
        if "wrong" in step:
            engine.collective_rpc("set_wrong_kernel", name=step["wrong"])
        sampling = {"temperature": 0.0, "max_new_tokens": step["max_tokens"], "ignore_eos": True}
        scores = {"logprob_start_len": 0} if step.get("scores") else {"top_logprobs_num": VOCABULARY}
        if "while" in step:
            Path(step["while"]).touch()
        outputs = engine.generate(input_ids=step["prompts"], sampling_params=sampling, return_logprob=True, **scores)
        if "while" in step:
            Path(step["while"]).unlink()
        metas = [output["meta_info"] for output in outputs]
        tops = [] if step.get("scores") else [row for meta in metas for row in meta["output_top_logprobs"]]
        given = [[*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]] for meta in metas]
        steps.append(
            {
                "tokens": [output["output_ids"] for output in outputs],
                "rows": [{token: logprob for logprob, token, _ in row} for row in tops],
                "scores": [[score for score, *_ in text] for text in given] if step.get("scores") else [],
                "cached": [meta["cached_tokens"] for meta in metas],
            }
        )
    reports = report.collect(engine)
    engine.shutdown()
    return {"pid": os.getpid(), "steps": steps, "report": reports[0], "reports": reports}


if __name__ == "__main__":  # SGLang starts its processes by spawning this file again
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))

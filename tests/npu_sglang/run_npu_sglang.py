"""An SGLang engine on the emulated NPU, in a process of its own: ``python run_npu_sglang.py job.json result.json``.

A job is ``{"engine": arguments of sglang.Engine, "steps": [...]}``, a step ``{"prompts": token ids, "max_tokens": n,
"wrong": the ``npu::`` operator whose kernel is wrong, with an emptied cache, "while": a file that exists during the
step, with an emptied cache}``.
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
        if "wrong" in step or "while" in step:
            _flush(engine)
        if "wrong" in step:
            engine.collective_rpc("set_wrong_kernel", name=step["wrong"])
        sampling = {"temperature": 0.0, "max_new_tokens": step["max_tokens"], "ignore_eos": True}
        scores = {"return_logprob": True, "top_logprobs_num": VOCABULARY}
        if "while" in step:
            Path(step["while"]).touch()
        outputs = engine.generate(input_ids=step["prompts"], sampling_params=sampling, **scores)
        if "while" in step:
            Path(step["while"]).unlink()
        rows = [row for output in outputs for row in output["meta_info"]["output_top_logprobs"]]
        steps.append(
            {
                "tokens": [output["output_ids"] for output in outputs],
                "rows": [{token: logprob for logprob, token, _ in row} for row in rows],
                "cached": [output["meta_info"]["cached_tokens"] for output in outputs],
            }
        )
    reports = report.collect(engine)
    engine.shutdown()
    return {"pid": os.getpid(), "steps": steps, "report": reports[0], "reports": reports}


if __name__ == "__main__":  # SGLang starts its processes by spawning this file again
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))

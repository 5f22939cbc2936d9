"""A vLLM engine on the emulated NPU, in a process of its own: ``python run_npu_vllm.py job.json result.json``.

A job is ``{"engine": arguments of LLM, "steps": [...]}``, a step ``{"prompts": token ids, "max_tokens": n, "wrong": the
``npu::`` operator whose kernel is wrong, "reset": whether the prefix cache is emptied before, "adapters": the folder of
each prompt's LoRA adapter, or null, "while": a file that exists during the step, "scores": whether the result has the
log-probabilities of the prompts' and the generated tokens, and no others, "sampling": further options of each prompt's
sampling}``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def _answer(output: Any) -> dict[str, Any]:
    """A prompt's tokens and log-probabilities, as the other engines' scripts have them."""

    def values(rows: Any) -> list[Any]:
        return [row and {token: value.logprob for token, value in row.items()} for row in rows or ()]

    return {
        "tokens": [list(output.outputs[0].token_ids)],
        "logprobs": [values(output.outputs[0].logprobs)],
        "prompt_logprobs": values(output.prompt_logprobs),
    }


def _sampling(options: dict[str, Any]) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    from vllm import SamplingParams

    if "logit_bias" in options:  # JSON has texts for keys
        options = {**options, "logit_bias": {int(token): value for token, value in options["logit_bias"].items()}}
    if "structured_outputs" in options:
        options = {**options, "structured_outputs": StructuredOutputsParams(**options["structured_outputs"])}
    return SamplingParams(**options)


def main(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    import emulated_npu
    from fl_dispatch.cli.checkpoints import VOCABULARY
    from vllm import LLM

    llm = LLM(**job["engine"])
    llm.collective_rpc("fl_set_counting", args=(True,))
    steps = []
    for step in job["steps"]:
        os.environ["EMU_NPU_WRONG"] = step.get("wrong", "")  # read at each call of a kernel
        if step.get("reset"):
            assert llm.reset_prefix_cache()
        if "while" in step:
            Path(step["while"]).touch()
        emulated_npu.reset_calls()
        emulated_npu.reset_waits()
        wanted = {"logprobs": 0, "prompt_logprobs": 0} if step.get("scores") else {"logprobs": VOCABULARY}
        wanted |= {"temperature": 0.0, "max_tokens": step["max_tokens"], "ignore_eos": True}
        sampling = [_sampling({**wanted, **own}) for own in step.get("sampling", [{}] * len(step["prompts"]))]
        folders = step.get("adapters", [])
        adapters = [folder and LoRARequest(folder, 1 + folders.index(folder), folder) for folder in folders]
        prompts = [{"prompt_token_ids": ids} for ids in step["prompts"]]
        outputs = llm.generate(prompts, sampling, lora_request=adapters or None, use_tqdm=False)
        if "while" in step:
            Path(step["while"]).unlink()
        answers = [_answer(output) for output in outputs]
        steps.append(
            {
                "tokens": [answer["tokens"][0] for answer in answers],
                "texts": [output.outputs[0].text for output in outputs],
                "rows": [row for answer in answers for row in answer["logprobs"][0]],
                "answers": answers if step.get("scores") else [],
                "cached": [output.num_cached_tokens for output in outputs],
                "kernels": emulated_npu.calls(),
                "waits": emulated_npu.waits(),
                "graphs": emulated_npu.graph_counts(),
            }
        )
    reports = llm.collective_rpc("fl_report")
    counted = [] if job["engine"].get("disable_log_stats", True) else llm.get_metrics()
    metrics = {one.name: one.value for one in counted if hasattr(one, "value")}
    return {"pid": os.getpid(), "steps": steps, "report": reports[0], "reports": reports, "metrics": metrics}


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))

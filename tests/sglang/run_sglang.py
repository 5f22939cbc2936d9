"""One engine in a process of its own: ``python run_sglang.py job.json result.json``.

A job is ``{"engine": arguments of sglang.Engine, "policy_before": a policy, "steps": [...], "doctor": bool,
"linger": seconds that the engine lives on after its steps, because SGLang kills its processes}``, a step
``{"prompts": token ids, "max_tokens": n, "policy": a policy, "scores": bool, "load": the name and folder of an adapter,
"lora": the adapter of each prompt, "sampling": parameters beside the greedy ones}``; a policy is the arguments of
``SelectionPolicy.from_dict``, or null.

Further words of a step are ``weights``: a checkpoint that a trainer hands over first, and ``group``: the port where it
meets the ranks, to do so by broadcasts; ``call``: a method of the engine that is called then, and its arguments;
``more``: further arguments of ``generate``, with which the result has all ``metas``; ``forced``: whether the processor
in ``forced_logits`` decides; ``apart``: whether each prompt is a request of its own, and the result has their
``answers``. A step with texts to ``encode`` is no more, and its result their ``vectors``.

``scores`` of the result are the log-probabilities of all tokens but a text's first, ``drafts`` how often drafts of a
text were checked, and how many were right. The first policy is set in this process before the scheduler's is started. A
step's is set in the scheduler's, with an empty cache, by the plugin module ``policy_method``. A data-parallel engine
reports nothing and takes no other policy; ``records`` of the result are those that its workers left. ``doctor`` of the
result is what ``fl doctor --json`` says while the engine serves.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any


def _flush(engine: Any) -> None:
    """Empty the cache, once the scheduler has noticed that it is idle."""
    deadline = time.monotonic() + 30
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _hand_over(engine: Any, folder: Path, port: int | None) -> None:
    """Give the engine a checkpoint's tensors as a trainer does: in one call, or by broadcasts within a group."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    sending: Any = None if port is None else _join(engine, port)
    assert engine.begin_weight_update()[0]
    if sending is None:
        assert engine.update_weights_from_tensor(list(tensors.items()))[0]
    else:
        with ThreadPoolExecutor(1) as trainer:
            sent = trainer.submit(lambda: [sending(tensor) for tensor in tensors.values()])
            types = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
            shapes = [list(tensor.shape) for tensor in tensors.values()]
            found = engine.update_weights_from_distributed(list(tensors), types, shapes, group_name="trainer")
            assert found[0], found
            sent.result()
    assert engine.end_weight_update()[0]


def _join(engine: Any, port: int) -> Any:
    """Meet the engine's ranks in a group at a port; a function that broadcasts a tensor to them."""
    import torch.distributed
    from sglang.srt.utils import init_custom_process_group

    ranks = engine.server_args.tp_size
    with ThreadPoolExecutor(1) as trainer:
        made = trainer.submit(
            init_custom_process_group,
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=1 + ranks,
            rank=0,
            group_name="trainer",
        )
        assert engine.init_weights_update_group("127.0.0.1", port, 1, 1 + ranks, "trainer", "gloo")[0]
        group = made.result()
    return lambda tensor: torch.distributed.broadcast(tensor, src=0, group=group)


def _apart(engine: Any, prompts: list[list[int]], sampling: dict[str, Any]) -> list[Any]:
    """Each prompt's tokens, or the text of its error, as clients of their own get them at once."""

    async def ask() -> list[Any]:
        asked = (engine.async_generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts)
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = engine.loop.run_until_complete(ask())
    return [str(one) if isinstance(one, Exception) else one["output_ids"] for one in answers]


def _doctor() -> dict[str, Any]:
    command = [Path(sys.executable).with_name("fl"), "doctor", "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
    return found


def main(job: dict[str, Any]) -> dict[str, Any]:
    from fl_dispatch import SelectionPolicy, set_global_policy

    if job.get("policy_before") is not None:
        set_global_policy(SelectionPolicy.from_dict(**job["policy_before"]))
    import sglang
    from fl_dispatch.hosting.records import runs
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
        if "encode" in step:
            steps.append({"vectors": [found["embedding"] for found in engine.encode(step["encode"])]})
            continue
        sampling = {"temperature": 0.0, "max_new_tokens": step["max_tokens"], "ignore_eos": True}
        sampling |= step.get("sampling", {})
        asked = {"return_logprob": True, "logprob_start_len": 0} if step.get("scores") else {}
        adapters = {"lora_path": step["lora"]} if "lora" in step else {}
        if "load" in step:
            engine.load_lora_adapter(*step["load"])
        if "weights" in step:
            _hand_over(engine, Path(step["weights"]), step.get("group"))
        answer: Any = None
        if "call" in step:
            name, arguments = step["call"]
            answer = getattr(engine, name)(**arguments)
            while "cache was not flushed" in str(answer):  # the last request has not quite ended
                time.sleep(0.1)
                answer = getattr(engine, name)(**arguments)
            if name == "release_memory_occupation":
                engine.resume_memory_occupation()
        more = {**asked, **adapters, **step.get("more", {})}
        if step.get("forced"):
            from forced_logits import Forced

            more["custom_logit_processor"] = Forced.to_str()
        if step.get("apart"):
            steps.append({"answers": _apart(engine, step["prompts"], sampling)})
            continue
        outputs = engine.generate(input_ids=step["prompts"], sampling_params=sampling, **more)
        metas = [output["meta_info"] for output in outputs] if asked else []
        steps.append(
            {
                "answer": answer,
                "metas": [output["meta_info"] for output in outputs] if "more" in step else [],
                "texts": [output["text"] for output in outputs],
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
    if answers and report.collect(engine)[0]["prompt_graphs"]:  # a prompt of one token is in none, so it is counted
        engine.generate(input_ids=[[5]], sampling_params={"temperature": 0.0, "max_new_tokens": 1})
    reports = report.collect(engine) if answers else [None]
    records = [] if answers else [asdict(run) for run in runs.of_engine()]
    doctor = _doctor() if job.get("doctor") else None
    time.sleep(job.get("linger", 0))
    engine.shutdown()
    said = {"report": reports[0], "reports": reports, "records": records, "doctor": doctor}
    return {"pid": os.getpid(), "steps": steps, **said}


if __name__ == "__main__":  # SGLang starts its processes by spawning this file again
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result, default=str))

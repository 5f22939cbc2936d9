"""One engine whose prompts run alone and in batches: ``python run_invariant.py job.json result.json``.

A job is ``{"engine": arguments of LLM, "prompts": token ids, "max_tokens": n, "drawn": whether some requests sample,
with a seed}``. The answer has what each prompt got in
each way, as a list of tokens and of log-probabilities written as hexadecimal numbers.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    llm.collective_rpc("fl_set_counting", args=(True,))
    prompts: list[list[int]] = job["prompts"]
    draw = random.Random(0)

    def answers(order: list[int], scored: bool) -> dict[int, Any]:
        common = {"max_tokens": job["max_tokens"], "ignore_eos": True, "logprobs": 3}
        greedy = SamplingParams(temperature=0.0, **common, **({"prompt_logprobs": 2} if scored else {}))
        drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=7, **common)
        options = [drawn if job["drawn"] and place % 4 == 0 else greedy for place in order]
        asked = [{"prompt_token_ids": prompts[place]} for place in order]
        outputs = llm.generate(asked, options, use_tqdm=False)
        return {place: _as_data(output) for place, output in zip(order, outputs, strict=True)}

    ways: dict[str, dict[int, Any]] = {}
    cached = 0
    places = list(range(len(prompts)))
    for scored in (False, True):
        name = "scored " if scored else ""
        alone = ways[name + "alone"] = {}
        for place in places:
            assert llm.reset_prefix_cache()
            alone.update(answers([place], scored))
        for batch in range(3):
            assert llm.reset_prefix_cache()
            ways[f"{name}batch {batch}"] = answers(draw.sample(places, len(places)), scored)
        ways[name + "from the cache"] = answers(places, scored)
        cached += sum(answer.pop("cached") for answer in ways[name + "from the cache"].values())
    for way in ways.values():
        for answer in way.values():
            answer.pop("cached", None)
    (report,) = llm.collective_rpc("fl_report")
    return {"ways": ways, "cached": cached, "report": report}


def _as_data(output: Any) -> dict[str, Any]:
    (made,) = output.outputs
    return {
        "tokens": list(made.token_ids),
        "logprobs": [_in_hex(row) for row in made.logprobs or ()],
        "prompt": [_in_hex(row) for row in output.prompt_logprobs or () if row],
        "cached": output.num_cached_tokens or 0,
    }


def _in_hex(row: Any) -> list[str]:
    return [f"{token} {found.logprob.hex()}" for token, found in sorted(row.items())]


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))

"""TRL trains a model by GRPO with an engine in its own process: ``python run_trl.py job.json result.json``.

A job is ``{"model": folder, "output": folder, "steps": n, "sleep": does the engine sleep while the trainer learns}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from run_features import weight_bytes

PROMPTS = ["the river runs", "cold white snow"]
COMPLETIONS, MAX_TOKENS = 8, 8


def main(job: dict[str, Any]) -> dict[str, Any]:
    """The mean reward of each step, and how far the engine's log-probabilities were from the trainer's.

    A completion's reward is its share of token ids in the lower half of the vocabulary. ``weights`` are the bytes that
    the engine's weights take in the end.
    """
    from datasets import Dataset
    from transformers import AutoConfig
    from trl import GRPOConfig, GRPOTrainer

    half = AutoConfig.from_pretrained(job["model"]).vocab_size // 2

    def small(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token < half for token in ids) / len(ids) for ids in completion_ids]

    asked = GRPOConfig(
        output_dir=job["output"],
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=job["sleep"],
        vllm_max_model_length=64,
        max_steps=job["steps"],
        per_device_train_batch_size=COMPLETIONS * len(PROMPTS),
        num_generations=COMPLETIONS,
        max_completion_length=MAX_TOKENS,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=1,
    )
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=small,
        args=asked,
        train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
    )
    llm = trainer.vllm_generation.llm
    llm.collective_rpc("fl_set_counting", args=(True,))
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "rewards": [entry["reward"] for entry in steps],
        "apart": [entry["sampling/sampling_logp_difference/mean"] for entry in steps],
        "weights": llm.collective_rpc(weight_bytes)[0],
        "report": llm.collective_rpc("fl_report")[0],
    }


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))

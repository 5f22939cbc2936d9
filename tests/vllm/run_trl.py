"""TRL trains a model with an engine in its own process: ``python run_trl.py job.json result.json``.

A job is ``{"model": folder, "output": folder, "trainer": a name of TRAINERS, "steps": n, "sleep": does the engine sleep
while the trainer learns}``. With ``"server": TRL's options of a server`` the engine is that server, and the trainer is
on a GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from run_features import weight_bytes

PROMPTS = ["the river runs", "cold white snow"]
COMPLETIONS, MAX_TOKENS = 8, 8


class Small:
    """The reward of a completion: its share of token ids below ``half``. ``means`` has that of each step."""

    __name__ = "small"

    def __init__(self, half: int) -> None:
        self.half = half
        self.means: list[float] = []

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = [sum(token < self.half for token in ids) / len(ids) for ids in completion_ids]
        self.means.append(sum(rewards) / len(rewards))
        return rewards


def grpo(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> tuple[Any, Any]:
    """A trainer by group relative policy optimization, and its engine."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    asked = GRPOConfig(
        vllm_max_model_length=64,
        per_device_train_batch_size=COMPLETIONS * len(PROMPTS),
        num_generations=COMPLETIONS,
        max_completion_length=MAX_TOKENS,
        model_init_kwargs={"dtype": "float32"},
        **common,
    )
    prompts = Dataset.from_list([{"prompt": text} for text in PROMPTS])
    trainer = GRPOTrainer(model=job["model"], reward_funcs=reward, args=asked, train_dataset=prompts)
    return trainer, getattr(trainer.vllm_generation, "llm", None)


def online_dpo(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> tuple[Any, Any]:
    """A trainer by direct preference optimization on the engine's own pairs of completions, and its engine."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    asked = OnlineDPOConfig(
        max_length=64,
        max_new_tokens=MAX_TOKENS,
        per_device_train_batch_size=COMPLETIONS * len(PROMPTS),
        model_init_kwargs={"dtype": "float32"},
        **common,
    )
    prompts = Dataset.from_list([{"prompt": text} for text in PROMPTS] * COMPLETIONS)
    trainer = OnlineDPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=asked,
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )
    return trainer, trainer.llm


def rloo(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> tuple[Any, Any]:
    """A trainer by REINFORCE with the other completions' mean reward as baseline, and its engine."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    asked = RLOOConfig(
        vllm_max_model_length=64,
        per_device_train_batch_size=COMPLETIONS * len(PROMPTS),
        num_generations=COMPLETIONS,
        max_completion_length=MAX_TOKENS,
        beta=0.0,
        normalize_advantages=True,
        model_init_kwargs={"dtype": "float32"},
        **common,
    )
    prompts = Dataset.from_list([{"prompt": text} for text in PROMPTS])
    trainer = RLOOTrainer(model=job["model"], reward_funcs=reward, args=asked, train_dataset=prompts)
    return trainer, getattr(trainer.vllm_generation, "llm", None)


TRAINERS = {"GRPO": grpo, "RLOO": rloo, "Online DPO": online_dpo}


def main(job: dict[str, Any]) -> dict[str, Any]:
    """The mean reward of each step, and how far the engine's log-probabilities were from the trainer's.

    RLOO and Online DPO tell nothing of the latter. ``weights`` are the bytes that the engine's weights take in the end;
    they and the report are those of an engine in this process.
    """
    from transformers import AutoConfig

    reward = Small(AutoConfig.from_pretrained(job["model"]).vocab_size // 2)
    common = {
        "output_dir": job["output"],
        "use_vllm": True,
        "vllm_mode": "server" if "server" in job else "colocate",
        **job.get("server", {}),
        "vllm_enable_sleep_mode": job["sleep"],
        "max_steps": job["steps"],
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": "server" not in job,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 1,
    }
    trainer, llm = TRAINERS[job["trainer"]](job, reward, common)
    if llm is not None:
        llm.collective_rpc("fl_set_counting", args=(True,))
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    difference = "sampling/sampling_logp_difference/mean"
    return {
        "rewards": reward.means,
        "apart": [entry[difference] for entry in steps if difference in entry],
        "weights": llm.collective_rpc(weight_bytes)[0] if llm is not None else None,
        "report": llm.collective_rpc("fl_report")[0] if llm is not None else None,
    }


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))

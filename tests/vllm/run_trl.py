"""TRL trains a model with an engine in its own process: ``python run_trl.py job.json result.json``.

A job is ``{"model": folder, "output": folder, "trainer": a name of TRAINERS, "steps": n, "rate": of learning, "sleep":
does the engine sleep while the trainer learns}``; with ``"teacher": folder`` and ``"teacher_server": URL`` of the model
that some imitate. With ``"server": TRL's options of a server`` the engine is that server, and the trainer is on a GPU.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from run_features import weight_bytes

PROMPTS = ["the river runs", "cold white snow"]
CONTEXT = "a small dog"
"""Those that learn from themselves get it before the prompt, as their own teacher."""
COMPLETIONS, MAX_TOKENS = 8, 8
FLOAT = {"dtype": "float32"}


class Small:
    """The reward of a completion: its share of token ids below ``half``. ``means`` has that of each step."""

    __name__ = "small"

    def __init__(self, half: int) -> None:
        self.half = half
        self.means: list[float] = []

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = [sum(token < self.half for token in ids) / len(ids) for ids in completion_ids]
        self.means.append(mean(rewards))
        return rewards


@dataclass
class Heard:
    """Two values of each step, about the completions that a trainer got from its engine.

    Args:
        apart: the mean distance of the engine's log-probabilities from the trainer's own.
        liked: the mean probability that the teacher gives the engine's tokens.
    """

    apart: list[float] = field(default_factory=list)
    liked: list[float] = field(default_factory=list)


def listen(trainer: Any, job: dict[str, Any]) -> Heard:
    """Hear what ``trainer.vllm_generation`` gives from now on."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teacher = AutoModelForCausalLM.from_pretrained(job["teacher"], **FLOAT) if "teacher" in job else None
    before = AutoTokenizer.from_pretrained(job["model"])(CONTEXT)["input_ids"] if job["trainer"] == "SDFT" else []
    heard = Heard()
    generation = trainer.vllm_generation
    generation.logprobs = 0  # the sampled token's, for which not all trainers ask
    generate = generation.generate

    def listened(*given: Any, **named: Any) -> Any:
        prompts, completions, logprobs, _ = answer = generate(*given, **named)
        apart, liked = [], []
        for prompt, completion, told in zip(prompts, completions, logprobs, strict=True):
            own = log_probabilities(trainer.model, prompt, completion)
            apart += [abs(mine - theirs) for mine, (theirs,) in zip(own, told, strict=True)]
            if teacher is not None:
                liked += [math.exp(value) for value in log_probabilities(teacher, [*before, *prompt], completion)]
        heard.apart.append(mean(apart))
        if liked:
            heard.liked.append(mean(liked))
        return answer

    generation.generate = listened
    return heard


def log_probabilities(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
    """A model's log-probability of each token of a completion."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]], device=model.device)).logits[0, len(prompt) - 1 : -1]
    every = logits.float().log_softmax(-1).cpu()
    return [float(every[place, token]) for place, token in enumerate(completion)]


def prompts(times: int = 1, **more: str) -> Any:
    """Each prompt so many times: once for trainers that repeat them."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": text, **more} for text in PROMPTS] * times)


def conversations() -> Any:
    """The prompts with an answer, which a trainer that generates does not read."""
    from datasets import Dataset

    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in PROMPTS]
    return Dataset.from_list([{"messages": messages} for messages in turns] * COMPLETIONS)


SHORT = {
    "vllm_max_model_length": 64,
    "per_device_train_batch_size": COMPLETIONS * len(PROMPTS),
    "max_completion_length": MAX_TOKENS,
    "model_init_kwargs": FLOAT,
}
GROUPS = {**SHORT, "num_generations": COMPLETIONS}
"""Several completions of each prompt."""
TAUGHT = {**SHORT, "teacher_model_init_kwargs": FLOAT}


def grpo(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> Any:
    """By group relative policy optimization."""
    from trl import GRPOConfig, GRPOTrainer

    asked = GRPOConfig(**GROUPS, **common)
    return GRPOTrainer(model=job["model"], reward_funcs=reward, args=asked, train_dataset=prompts())


def gmpo(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> Any:
    """The same with the geometric mean of ratios."""
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    asked = GMPOConfig(**GROUPS, **common)
    return GMPOTrainer(model=job["model"], reward_funcs=reward, args=asked, train_dataset=prompts())


def rloo(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> Any:
    """By REINFORCE with the other completions' mean reward as baseline."""
    from trl import RLOOConfig, RLOOTrainer

    asked = RLOOConfig(**GROUPS, beta=0.0, normalize_advantages=True, **common)
    return RLOOTrainer(model=job["model"], reward_funcs=reward, args=asked, train_dataset=prompts())


def online_dpo(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> Any:
    """By direct preference optimization on the engine's own pairs of completions."""
    from transformers import AutoTokenizer
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    asked = OnlineDPOConfig(
        max_length=64,
        max_new_tokens=MAX_TOKENS,
        per_device_train_batch_size=COMPLETIONS * len(PROMPTS),
        model_init_kwargs=FLOAT,
        **common,
    )
    return OnlineDPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=asked,
        train_dataset=prompts(COMPLETIONS),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )


def sdpo(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> Any:
    """By policy gradients, and by itself after it has read a completion that did well."""
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    asked = SDPOConfig(
        **GROUPS,
        distillation_weight=0.1,
        success_reward_threshold=0.7,
        reprompt_template="{solution} {prompt}{feedback}",
        solution_template="{successful_previous_attempt}",
        **common,
    )
    return SDPOTrainer(model=job["model"], reward_funcs=reward, args=asked, train_dataset=prompts())


def sdft(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> Any:
    """By itself as it was after it has read a context."""
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer

    asked = SDFTConfig(
        **GROUPS, teacher_model_kind="base", teacher_prompt_template="{privileged_context} {prompt}", **common
    )
    context = prompts(privileged_context=CONTEXT)
    return SDFTTrainer(model=job["model"], args=asked, train_dataset=context)


def distillation(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> Any:
    """By a teacher's probabilities of the student's completions."""
    from trl import DistillationConfig, DistillationTrainer

    asked = DistillationConfig(**TAUGHT, **common)
    return DistillationTrainer(
        model=job["model"], teacher_model=job["teacher"], args=asked, train_dataset=prompts(COMPLETIONS)
    )


def server_distillation(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> Any:
    """The same; the teacher is a server."""
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

    asked = ServerDistillationConfig(
        **SHORT, beta=0.0, loss_top_k=8, teacher_model_server_url=job["teacher_server"], **common
    )
    return ServerDistillationTrainer(model=job["model"], args=asked, train_dataset=prompts(COMPLETIONS))


def gold(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> Any:
    """By a teacher that may have another tokenizer."""
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    asked = GOLDConfig(**TAUGHT, max_length=64, lmbda=1.0, temperature=1.0, top_p=1.0, use_extended_uld=False, **common)
    return GOLDTrainer(model=job["model"], teacher_model=job["teacher"], args=asked, train_dataset=conversations())


def iw_opd(job: dict[str, Any], reward: Small, common: dict[str, Any]) -> Any:
    """By a teacher, whose word counts the less the farther the student has gone from it."""
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

    asked = IWOPDConfig(**TAUGHT, max_length=64, max_prompt_length=32, top_p=1.0, **common)
    return IWOPDTrainer(model=job["model"], teacher_model=job["teacher"], args=asked, train_dataset=conversations())


TRAINERS = {
    "GRPO": grpo,
    "GMPO": gmpo,
    "RLOO": rloo,
    "Online DPO": online_dpo,
    "SDPO": sdpo,
    "SDFT": sdft,
    "Distillation": distillation,
    "Server Distillation": server_distillation,
    "GOLD": gold,
    "IW-OPD": iw_opd,
}


def main(job: dict[str, Any]) -> dict[str, Any]:
    """How far each step's completions reach the aim, and how far the engine's log-probabilities are from the trainer's.

    The aim is the reward, or what the teacher thinks of the completions. Online DPO calls its engine itself, so nothing
    is heard of it. ``weights`` are the bytes that the engine's weights take in the end; they and the report are those
    of an engine in this process.
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
        "learning_rate": job["rate"],
        "lr_scheduler_type": "constant",
        "use_cpu": "server" not in job,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 1,
    }
    trainer = TRAINERS[job["trainer"]](job, reward, common)
    heard = listen(trainer, job) if hasattr(trainer, "vllm_generation") else Heard()
    llm = getattr(getattr(trainer, "vllm_generation", trainer), "llm", None)
    if llm is not None:
        llm.collective_rpc("fl_set_counting", args=(True,))
    trainer.train()
    return {
        "rewards": reward.means or heard.liked,
        "apart": heard.apart,
        "weights": llm.collective_rpc(weight_bytes)[0] if llm is not None else None,
        "report": llm.collective_rpc("fl_report")[0] if llm is not None else None,
    }


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))

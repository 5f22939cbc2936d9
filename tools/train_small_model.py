"""Trains the small real model of ``fl demo`` and ``fl perplexity`` on English that ships with Python.

    python tools/train_small_model.py --work FOLDER --minutes 8      # again until it says that it is done
    python tools/train_small_model.py --work FOLDER --write          # into the package

One core takes about 16 minutes. The work folder keeps the state after every 50 steps, so a run that was ended goes on
where it was; its result is the same, because the rows of a step depend on the step alone. The result: a byte-level
BPE, a Llama of 1.3 million parameters in bfloat16, whose values float32 holds exactly, and the held-out text.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from small_model_text import documents, held_out_text, split

from fl_dispatch.cli import small_model
from fl_dispatch.evidence.perplexity import perplexity, rows_of

VOCABULARY, CONTEXT = 2048, 512
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,  # every backend takes it; the Ascend NPU's attention takes no smaller one
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEED = 20261123
STEPS, ROWS, ROW = 1600, 16, 256
"""Steps, and rows of a step with the tokens of a row; the last third of the steps has fewer rows of ``CONTEXT``."""
LONG_FROM = 2 / 3
MUON_RATE, ADAM_RATE, WARM_UP, DECAY_FROM = 0.02, 4e-3, 40, 0.5
KEEP_EVERY = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the state between runs")
    parser.add_argument("--minutes", type=float, default=60.0, help="end after so long, and go on in the next run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--write", action="store_true", help="write a model that is done into the package")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    given.work.mkdir(parents=True, exist_ok=True)
    training, held_out = split(documents())
    tokenizer = _tokenizer(training, given.work)
    stream, measured = (_tokens(tokenizer, texts) for texts in (training, ["\n\n".join(held_out)]))
    print(f"{sum(map(len, training)) / 1e6:.2f} MB in {len(training)} documents, {len(stream):,} tokens")
    training_run = Training(given.steps)
    training_run.restore(given.work / "state.pt")
    if given.write:
        facts = {"trained on": {"documents": len(training), "bytes": sum(map(len, training)), "tokens": len(stream)}}
        _write(training_run, tokenizer, held_out_text(held_out), facts)
        return
    ended = time.monotonic() + 60 * given.minutes
    training_run.run(stream, measured, given.work / "state.pt", ended)


class Training:
    """A model, its optimizers, and the step that comes next."""

    def __init__(self, steps: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(SEED)
        self.steps = steps
        self.step = 0
        config = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        self.model = LlamaForCausalLM(config)
        for name, weight in self.model.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                deviation = 0.02 / math.sqrt(2 * config.num_hidden_layers) if last else 0.02
                torch.nn.init.normal_(weight, std=deviation)
        inner = {n: p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n}
        others = [p for n, p in self.model.named_parameters() if n not in inner]
        self.optimizers = [
            torch.optim.Muon(list(inner.values()), lr=MUON_RATE, weight_decay=0.05, momentum=0.95),
            torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        self.rates = [MUON_RATE, ADAM_RATE]

    def restore(self, file: Path) -> None:
        """Go on from a file, if there is one."""
        if file.exists():
            state = torch.load(file, weights_only=True)
            self.step = state["step"]
            self.model.load_state_dict(state["model"])
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)

    def keep(self, file: Path) -> None:
        """Write the state, whole or not at all."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def run(self, stream: torch.Tensor, measured: torch.Tensor, file: Path, ended: float) -> None:
        """Train until the steps are done, or it is so late; Ctrl-C keeps what there is."""
        began, first = time.monotonic(), self.step
        try:
            while self.step < self.steps and time.monotonic() < ended:
                loss = self.advance(stream)
                if self.step % KEEP_EVERY == 0 or self.step == self.steps:
                    self.keep(file)
                    left = (time.monotonic() - began) / (self.step - first) * (self.steps - self.step)
                    held = f", held out {self.loss(measured):.3f}" if self.step % 200 == 0 else ""
                    line = f"step {self.step} of {self.steps}, loss {loss:.3f}{held}"
                    print(f"{line}, {left / 60:.1f} minutes left", flush=True)
        except KeyboardInterrupt:
            pass
        self.keep(file)
        print("done" if self.step == self.steps else f"{self.step} of {self.steps} steps: run it again")

    def advance(self, stream: torch.Tensor) -> float:
        """One step; its loss in nats a token."""
        long = self.step >= LONG_FROM * self.steps
        length, rows = (CONTEXT, ROWS * ROW // CONTEXT) if long else (ROW, ROWS)
        chance = torch.Generator().manual_seed(SEED + self.step)
        starts = torch.randint(len(stream) - length, (rows,), generator=chance).tolist()
        ids = torch.stack([_row(stream, start, length) for start in starts])
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * _schedule(self.step, self.steps)
        loss = self._forward(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    def loss(self, stream: torch.Tensor) -> float:
        """The mean loss over a stream, in nats a token."""
        rows = [_row(stream, start, CONTEXT) for start in range(0, len(stream) - CONTEXT, CONTEXT)]
        with torch.no_grad():
            losses = [self._forward(row[None]).item() for row in rows]
        return sum(losses) / len(losses)

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(ids[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def _row(stream: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """So many tokens of a stream after the token that begins every text."""
    return torch.cat([torch.tensor([SHAPE["bos_token_id"]]), stream[start : start + length]])


def _schedule(step: int, steps: int) -> float:
    """The part of the learning rate at a step: a warm-up, level, and a fall to zero."""
    return min(1.0, (step + 1) / WARM_UP, (steps - step) / (steps * (1 - DECAY_FROM)))


def _tokenizer(texts: list[str], work: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    file = work / "tokenizer.json"
    if file.exists():
        return Tokenizer.from_file(str(file))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", SHAPE["bos_token_id"])]
    )
    tokenizer.save(str(file))
    return tokenizer


def _tokens(tokenizer: Any, texts: list[str]) -> torch.Tensor:
    ids: list[int] = []
    for encoded in tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += [*encoded.ids, SHAPE["eos_token_id"]]
    return torch.tensor(ids)


def _write(training: Training, tokenizer: Any, held_out: str, facts: dict[str, Any]) -> None:
    """The checkpoint as Hugging Face's, the held-out text, and the perplexity that it should have."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    if training.step < training.steps:
        raise SystemExit(f"{training.step} of {training.steps} steps: the model is not done")
    folder = small_model.CHECKPOINT
    folder.mkdir(parents=True, exist_ok=True)
    training.model.generation_config.do_sample = False
    training.model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # a temporary file became it
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT, **special)
    template = folder / "chat_template.jinja"
    made.chat_template = template.read_text(encoding="utf-8") if template.exists() else None
    made.save_pretrained(folder)
    small_model.HELD_OUT.write_text(held_out, encoding="utf-8")
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = tokenizer.encode(held_out, add_special_tokens=False).ids
    found = perplexity(
        [_scores(network, row) for row in rows_of(ids, SHAPE["bos_token_id"], small_model.WINDOW)],
        len(held_out.encode()),
    )
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    written = {
        "parameters": sum(weight.numel() for weight in training.model.parameters()),
        **found.as_data(),
        "window": small_model.WINDOW,
        "steps": training.steps,
        "seed": SEED,
        **facts,
        "versions": versions,
    }
    (small_model.FOLDER / "facts.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(written, indent=1))


def _scores(network: Any, row: list[int]) -> list[float]:
    """The log-probabilities of a row's tokens but the first, by Hugging Face's model in float32."""
    ids = torch.tensor(row)
    with torch.no_grad():
        chances = network(ids[None]).logits[0, :-1].log_softmax(-1)
    return chances.gather(-1, ids[1:, None])[:, 0].tolist()


if __name__ == "__main__":
    main()

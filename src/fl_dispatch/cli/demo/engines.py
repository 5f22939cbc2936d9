"""The engine of the demonstration, which generates greedily and reports the dispatched operators."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engines import Prompt, Start, start
from ..hosts import Host


@dataclass(frozen=True)
class Request:
    """A request to an engine.

    Args:
        model: the checkpoint's folder.
        prompts: the prompts' texts.
        tokens: number of tokens to generate for each prompt.
        dtype: the hosts' name of the model's dtype.
        compiled: whether ``torch.compile`` compiles the model.
        scored: return log-probabilities, too.
    """

    model: Path
    prompts: list[str]
    tokens: int
    dtype: str = "float32"
    compiled: bool = False
    scored: bool = False

    @property
    def vocabulary(self) -> int:
        """Size of the model's vocabulary."""
        return int(json.loads((self.model / "config.json").read_text(encoding="utf-8"))["vocab_size"])


@dataclass(frozen=True)
class Generated:
    """The text that one engine generated, and its time.

    Args:
        prompts, tokens: token ids of each prompt, and of its continuation.
        texts: the continuations, as text.
        seconds: time to generate all of them.
        rows: token as a string → log-probability, for every token but the first of each prompt, the prompt before its
            continuation. Empty unless scored.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    texts: list[str]
    seconds: float
    rows: Sequence[Mapping[str, float]] = ()

    @property
    def sequences(self) -> list[list[int]]:
        """Return the tokens of prompts with their continuations."""
        return [[*prompt, *tokens] for prompt, tokens in zip(self.prompts, self.tokens, strict=True)]

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds


def generate(host: Host, request: Request) -> tuple[Generated, dict[str, Any]]:
    """Generate with an engine of one rank; return the result, and a report without the calls of the warm-up."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request.model)
    ids = [tokenizer(prompt).input_ids for prompt in request.prompts]
    eager = host is Host.VLLM and not request.compiled  # SGLang captures graphs by default
    engine = start(Start(host, str(request.model), eager, dtype=request.dtype))
    engine.generate([Prompt(ids[0], new=2)])  # warm up
    engine.count()
    top = request.vocabulary if request.scored else None
    prompts = [Prompt(row, request.tokens, top, request.scored) for row in ids]
    answers = engine.generate(prompts)
    (report,) = engine.close()
    found, rows = [answer.tokens for answer in answers], [row for answer in answers for row in answer.rows]
    texts = tokenizer.batch_decode(found, skip_special_tokens=True)
    return Generated(ids, found, texts, engine.seconds, rows), report

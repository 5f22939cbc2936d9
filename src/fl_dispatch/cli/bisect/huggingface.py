"""Hugging Face's scores of the same requests, to check that the trusted policy is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import DispatchError
from ...evidence.bisect.prompts import TOP, Request
from ...evidence.bisect.scores import Scores, difference
from ...evidence.bisect.yardstick import FACTOR, Yardstick
from ..engines import Start
from ..network import network


def compare(start: Start, rounds: Sequence[Sequence[Request]], base: Scores, yardstick: Yardstick) -> float:
    """Compare the good policy's scores with Hugging Face's in float32; return their distance in yardsticks.

    In half precision the yardstick includes the distance of Hugging Face's own model from float32.

    Raises:
        DispatchError: the scores disagree, so no choice of implementations explains the difference.
    """
    import torch
    from transformers import AutoConfig

    single = _scores(start.model, torch.float32, rounds)
    config = AutoConfig.from_pretrained(start.model)
    dtype = getattr(torch, start.dtype) if start.dtype != "auto" else (config.dtype or torch.float32)
    if dtype is not torch.float32:
        own = Yardstick.of([difference(single, _scores(start.model, dtype, rounds))])
        yardstick = Yardstick(max(yardstick.largest, own.largest), max(yardstick.mean, own.mean))
    found = difference(single, base)
    share = yardstick.share(found)
    if share > FACTOR:
        raise DispatchError(
            f"the engine under references differs from Hugging Face by {share:.1f} yardsticks ({found.where}), so no "
            "choice between implementations explains it: compare the host itself, or the references (fl verify)"
        )
    return share


def _scores(model: str, dtype: Any, rounds: Sequence[Sequence[Request]]) -> Scores:
    import torch

    made = network(model, dtype)
    rows: dict[str, list[dict[str, float]]] = {}
    for request in (one for requests in rounds for one in requests):
        with torch.inference_mode():
            tokens = [*request.prompt, *request.forced[:-1]]
            logits = made(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        first = 0 if request.prefill else len(request.prompt) - 1
        best = logits[first:].topk(min(TOP, logits.shape[-1]))
        found = [
            {str(token): value for token, value in zip(ids, values, strict=True)}
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        rows[request.label] = found
    return Scores(rows)

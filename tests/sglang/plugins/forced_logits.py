"""A client's processor of logits, which lets one token pass; ``custom_params`` name it."""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor


class Forced(CustomLogitProcessor):
    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        for row, given in zip(logits, custom_param_list or [], strict=True):
            row.fill_(-float("inf"))
            row[given["token"]] = 0.0
        return logits

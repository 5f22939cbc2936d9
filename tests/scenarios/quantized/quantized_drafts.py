"""Targets and drafters with quantized weights, in either or in both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import drafters
import quantized_checkpoints as checkpoints
from fl_dispatch.cli.checkpoints import build_checkpoint
from quantized_checkpoints import SCHEMES
from quantized_mixture import LATENT
from variants import unsure


class Run(NamedTuple):
    """Who drafts, the schemes of the target and of the drafter (empty: not quantized), and the drafted tokens."""

    method: str
    target: str
    drafter: str
    tokens: int = 3

    def __str__(self) -> str:
        return f"{self.method}, {self.drafter or 'plain'} for {self.target or 'plain'}"


class Models(NamedTuple):
    """A target as it was before, as it is served, and what drafts for it."""

    plain: Path
    target: Path
    drafter: Path


MAKERS: Mapping[str, Callable[[Path, Path], Path]] = {
    "draft_model": drafters.noisy,
    "eagle": drafters.eagle,
    "eagle3": drafters.eagle3,
    "mtp": drafters.with_mtp,
}


def models(run: Run, folder: Path) -> Models:
    """Write a run's checkpoints into a folder that is not there yet."""
    folder.mkdir()
    family = drafters.TARGETS[run.method]
    sizes = LATENT if family == "deepseek_v3" else {}
    plain = unsure(build_checkpoint(family, folder / "sure", **sizes), folder / "plain")

    def quantized(scheme: str, model: Path, target: Path) -> Path:
        return checkpoints.write_checkpoint(target, SCHEMES[scheme], model=model) if scheme else model

    drafter = quantized(run.drafter, MAKERS[run.method](plain, folder / "plain drafter"), folder / "drafter")
    return Models(plain, drafter if run.method == "mtp" else quantized(run.target, plain, folder / "target"), drafter)

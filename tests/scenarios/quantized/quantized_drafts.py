"""Targets and drafters, one or both with quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import drafters
import quantized_checkpoints as checkpoints
from drafting import LONG, SHORT, Drafting, Models
from fl_dispatch.cli.checkpoints import build_checkpoint
from host_engines import Served
from quantized_checkpoints import SCHEMES
from quantized_mixture import LATENT
from quantized_network import Comparison, network
from variants import unsure


class Run(NamedTuple):
    """The drafting method, the schemes of target and drafter (empty: not quantized), and the drafted tokens."""

    method: str
    target: str
    drafter: str
    tokens: int = 3

    def __str__(self) -> str:
        return f"{self.method}, {self.drafter or 'plain'} for {self.target or 'plain'}"

    def speculation(self, drafter: Path | None) -> dict[str, Any]:
        """Return vLLM's configuration."""
        return {"method": self.method, "model": str(drafter), "num_speculative_tokens": self.tokens}


MAKERS: Mapping[str, Callable[[Path, Path], Path]] = {
    "draft_model": drafters.noisy,
    "eagle": drafters.eagle,
    "eagle3": drafters.eagle3,
    "mtp": drafters.with_mtp,
}


class QuantizedDrafts(Drafting):
    """Drafts with quantized weights of the target or the drafter."""

    ENGINE: ClassVar[Mapping[str, Any]]
    """Arguments of both engines."""

    def drafting(self, run: Run, made: Models) -> Mapping[str, Any]:
        """Return the host's settings for a run's drafts."""
        raise NotImplementedError

    def used(self, report: Mapping[str, Any], scheme: str) -> int:
        """Return the number of an engine's layers with a scheme's kernel."""
        raise NotImplementedError

    def options(self, run: Run, made: Models, drafts: bool) -> Mapping[str, Any]:
        return {**self.ENGINE, **(self.drafting(run, made) if drafts else {})}

    def network(self, run: Run, made: Models) -> Any:
        return network(SCHEMES[run.target] if run.target else None, model=made.plain)

    def models(self, run: Run, folder: Path) -> Models:
        return models(run, folder)

    def test_both_models_run_our_products(self, run: Run, served: Callable[[Any], tuple[Served, Served]]) -> None:
        drafted, plain = (engine.reports[0] for engine in served(run))
        assert all(self.used(drafted, scheme) > 0 for scheme in (run.target, run.drafter) if scheme)
        assert not run.drafter or self.used(drafted, run.drafter) > self.used(plain, run.drafter)

    def test_judged_tokens_are_the_networks_where_rounding_does_not_decide(
        self, judged: Run, made: Mapping[Run, Models], served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        """Allow for rounding, because a step that checks drafts sums in another order than a step with one token.

        That can change the last place of an input, and its quantization by a whole step.
        """
        for engine in served(judged):
            for asked, answer in zip((SHORT, LONG), engine.answers[:2], strict=True):
                right = {"model": made[judged].plain, "new": asked.max_tokens}
                compared = Comparison.of(*answer.scored(), SCHEMES[judged.target], 1, **right)
                assert compared.agrees
                assert compared.right.decides(asked.prompts, asked.max_tokens)


def models(run: Run, folder: Path) -> Models:
    """Write a run's checkpoints into a new folder."""
    folder.mkdir()
    family = drafters.TARGETS[run.method]
    sizes = LATENT if family == "deepseek_v3" else {}
    plain = unsure(build_checkpoint(family, folder / "sure", **sizes), folder / "plain")

    def quantized(scheme: str, model: Path, target: Path) -> Path:
        return checkpoints.write_checkpoint(target, SCHEMES[scheme], model=model) if scheme else model

    drafter = quantized(run.drafter, MAKERS[run.method](plain, folder / "plain drafter"), folder / "drafter")
    return Models(plain, drafter if run.method == "mtp" else quantized(run.target, plain, folder / "target"), drafter)

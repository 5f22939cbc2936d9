"""Targets and drafters, one or both with quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import drafters
import quantized_checkpoints as checkpoints
from drafting import LONG, LOOK_UP, NGRAM, SHORT, Drafting, Models
from fl_dispatch.cli.checkpoints import build_checkpoint
from host_engines import WRONG, Pass, Served
from quantized_checkpoints import SCHEMES, Scheme, WithIndexer
from quantized_mixture import LATENT, sparse
from quantized_network import Comparison, network
from variants import unsure


class Run(NamedTuple):
    """The drafting method, the schemes of target and drafter (empty: not quantized), and the drafted tokens.

    Args:
        sparse: whether the target has sparse latent attention, and a predictor that reads as the model does.
        ranks: among which both are divided.
    """

    method: str
    target: str
    drafter: str
    tokens: int = 3
    sparse: bool = False
    ranks: int = 1

    def __str__(self) -> str:
        how = (", sparse" if self.sparse else "") + (f", {self.ranks} ranks" if self.ranks > 1 else "")
        return f"{self.method}, {self.drafter or 'plain'} for {self.target or 'plain'}{how}"

    def speculation(self, drafter: Path | None) -> dict[str, Any]:
        """Return vLLM's configuration."""
        who = LOOK_UP if drafter is None else {"model": str(drafter)}
        return {"method": self.method, "num_speculative_tokens": self.tokens, **who}


MAKERS: Mapping[str, Callable[[Path, Path], Path]] = {
    "draft_model": drafters.noisy,
    "eagle": drafters.eagle,
    "eagle3": drafters.eagle3,
    "mtp": drafters.with_mtp,
}


class QuantizedDrafts(Drafting):
    """Drafts with quantized weights of the target or the drafter."""

    PLACE = {"plugins": ("wrong_plugin",), "deny": "wrong"}
    ENGINE: ClassVar[Mapping[str, Any]]
    """Arguments of both engines."""
    LISTING: ClassVar[Mapping[str, Any]] = {}
    """Further ones with sparse latent attention, so that no other request decides whether a step lists tokens."""
    RANKS: ClassVar[str] = "tensor_parallel_size"
    """The host's word."""
    ABSORBED: ClassVar[bool] = False
    """Whether the host's latent attention is absorbed for prompts too."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"listed": [run for run in self.RUNS if run.sparse], **super().cases()}

    def last(self, run: Run) -> Sequence[Pass]:
        operators = (SCHEMES[run.target].operators[-1], "mla_sparse") if run.sparse else ()
        return [Pass(orders={operator: WRONG}) for operator in operators]

    def drafting(self, run: Run, made: Models) -> Mapping[str, Any]:
        """Return the host's settings for a run's drafts."""
        raise NotImplementedError

    def written(self, run: Run, scheme: str) -> Scheme:
        """Return a scheme as a run's checkpoints have it."""
        return WithIndexer(**vars(SCHEMES[scheme])) if run.sparse else SCHEMES[scheme]

    def used(self, report: Mapping[str, Any], scheme: str) -> int:
        """Return the number of an engine's layers with a scheme's kernel."""
        raise NotImplementedError

    def options(self, run: Run, made: Models, drafts: bool) -> Mapping[str, Any]:
        listing = self.LISTING if run.sparse else {}
        return {**self.ENGINE, **listing, self.RANKS: run.ranks, **(self.drafting(run, made) if drafts else {})}

    def network(self, run: Run, made: Models) -> Any:
        return network(self.written(run, run.target) if run.target else None, model=made.plain)

    def models(self, run: Run, folder: Path) -> Models:
        folder.mkdir()

        def quantized(scheme: str, model: Path, target: Path) -> Path:
            return checkpoints.write_checkpoint(target, self.written(run, scheme), model=model) if scheme else model

        if run.sparse:
            make = drafters.repeating if run.method == NGRAM else drafters.with_reader
            plain = make(sparse(folder / "sure"), folder / "plain")
            target = quantized(run.target, plain, folder / "target")
            return Models(plain, target, None if run.method == NGRAM else target)
        family = drafters.TARGETS[run.method]
        sizes = LATENT if family == "deepseek_v3" else {}
        plain = unsure(build_checkpoint(family, folder / "sure", **sizes), folder / "plain")
        drafter = quantized(run.drafter, MAKERS[run.method](plain, folder / "plain drafter"), folder / "drafter")
        target = drafter if run.method == "mtp" else quantized(run.target, plain, folder / "target")
        return Models(plain, target, drafter)

    def test_both_models_run_our_products(self, run: Run, served: Callable[[Any], tuple[Served, Served]]) -> None:
        drafted, plain = (engine.reports[0] for engine in served(run))
        assert all(self.used(drafted, scheme) > 0 for scheme in (run.target, run.drafter) if scheme)
        assert not run.drafter or self.used(drafted, run.drafter) > self.used(plain, run.drafter)

    def test_a_wrong_implementation_changes_the_tokens(
        self, listed: Run, served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        first, *_, product, attention = served(listed)[0].answers
        assert product.tokens != first.tokens != attention.tokens

    def test_judged_tokens_are_the_networks_where_rounding_does_not_decide(
        self, judged: Run, made: Mapping[Run, Models], served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        """Allow for rounding, because a step that checks drafts sums in another order than a step with one token.

        That can change the last place of an input, and its quantization by a whole step.
        """
        engines, passes = (served(judged)[:1], (SHORT,)) if judged.sparse else (served(judged), (SHORT, LONG))
        for engine in engines:
            for asked, answer in zip(passes, engine.answers, strict=False):
                right = {"model": made[judged].plain, "absorbed": self.ABSORBED, "new": asked.max_tokens}
                compared = Comparison.of(*answer.scored(), self.written(judged, judged.target), judged.ranks, **right)
                assert compared.agrees
                assert compared.right.decides(asked.prompts, asked.max_tokens)

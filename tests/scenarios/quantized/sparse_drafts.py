"""Drafts beside sparse latent attention: checks have several queries a request, each with its own list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import drafters
from drafting import LOOK_UP, NGRAM, Drafting, Models
from fl_dispatch.cli.checkpoints import build_checkpoint
from host_engines import Served
from latent_cache import chosen
from running import PROMPTS, expected_tokens


class Run(NamedTuple):
    """Who drafts for which family.

    Args:
        shared: whether all drafts of a step take the list of its first one.
        alone: whether the engine has one request at a time, so that contexts are short.
        compiled: whether the models are.
        ranks: among which the model and its predictor are divided.
        predictors: of the model, each of which drafts one token.
        cache: the type of the cache's latents.
    """

    family: str
    method: str
    tokens: int = 3
    shared: bool = False
    alone: bool = False
    compiled: bool = False
    ranks: int = 1
    predictors: int = 1
    cache: str = "auto"

    def __str__(self) -> str:
        how = [name for name in ("shared", "alone", "compiled") if getattr(self, name)]
        how += [] if self.cache == "auto" else [self.cache]
        how += [f"{many} {name}" for name in ("ranks", "predictors") if (many := getattr(self, name)) > 1]
        return " ".join((self.family, self.method, str(self.tokens), *how))


class SparseDrafts(Drafting):
    """Greedy tokens of models with sparse latent attention equal Hugging Face's, with drafts and from the cache."""

    COMPILED: ClassVar[Mapping[str, Any]] = {"compilation_config": {"mode": 3, "backend": "eager"}}
    """Arguments of an engine with compiled models."""
    PASSES = 2

    def models(self, run: Run, folder: Path) -> Models:
        plain = build_checkpoint(run.family, folder / "plain")
        if run.method == NGRAM:
            repeating = drafters.repeating(plain, folder / "repeating")
            return Models(repeating, repeating, None)
        reader = drafters.with_reader(plain, folder / "reader", run.predictors)
        return Models(reader, reader, reader)

    def options(self, run: Run, made: Models, drafts: bool) -> Mapping[str, Any]:
        engine = {
            "max_num_seqs": 1 if run.alone else 64,
            "max_num_batched_tokens": 64,
            "enforce_eager": not run.compiled,
            "tensor_parallel_size": run.ranks,
            "kv_cache_dtype": run.cache,
            "attention_config": {"sparse_mla_force_mqa": run.cache != "auto"},
            **(self.COMPILED if run.compiled else {}),
        }
        if not drafts:
            return engine
        who = LOOK_UP if made.drafter is None else {"model": str(made.drafter)}
        shared = {"index_share_for_mtp_iteration": True} if run.shared else {}
        speculation = {"method": run.method, "num_speculative_tokens": run.tokens, **who, **shared}
        return {**engine, "speculative_config": speculation}

    def test_greedy_tokens_equal_hugging_face(
        self, run: Run, made: Mapping[Run, Models], served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        first, second, long = self.greedy(served(run)[0])
        assert first == second == self.right(run, made, PROMPTS, first)
        assert long == self.right(run, made, drafters.TURNS, long)

    def right(
        self, run: Run, made: Mapping[Run, Models], prompts: Sequence[list[int]], found: Sequence[list[int]]
    ) -> list[list[int]]:
        """Hugging Face's tokens; over a quantized cache what its network with rounded latents would choose."""
        model = made[run].plain
        if run.cache == "auto":
            return expected_tokens(model, prompts, len(found[0]))
        return chosen(model, prompts, found)

    def test_the_second_pass_comes_from_the_prefix_cache(
        self, run: Run, served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        for engine in served(run):
            assert max([answer for answer in engine.answers if answer.tokens][1].cached) > 300

    def test_a_request_takes_dense_attention_until_it_has_more_tokens_than_are_listed(
        self, run: Run, served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        """A list that later drafts take is made for short contexts, too."""
        counts = served(run)[0].reports[0]["counts"]
        calls = {
            name: sum(count for key, count in counts.items() if key.split(" ")[0] == name)
            for name in ("mla_decode", "mla_sparse")
        }
        assert calls["mla_sparse"] > 0
        if run.alone:  # beside longer ones a short context lists its tokens
            assert (calls["mla_decode"] > 0) == (not run.shared)

"""Drafts beside sparse latent attention: steps that check them have several queries a request, each with its own list.

A predictor has an indexer of its own, whose lists nothing but the number of right drafts shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import drafters
from drafting import LONG, LOOK_UP, NGRAM, SHORT, Drafting, Models
from fl_dispatch.cli.checkpoints import build_checkpoint
from host_engines import WRONG, Pass, Served
from latent_cache import chosen
from running import PROMPTS, expected_tokens
from sampling import drawn


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


RUNS = (
    Run("deepseek_v32", NGRAM, alone=True),
    Run("glm_moe_dsa", NGRAM, compiled=True),
    Run("deepseek_v32", "mtp", 1, alone=True),
    Run("glm_moe_dsa", "mtp", 3),
    Run("glm_moe_dsa", "mtp", 3, shared=True, alone=True),
    Run("deepseek_v32", "mtp", 2, ranks=2),
    Run("glm_moe_dsa", NGRAM, ranks=2),
    Run("deepseek_v32", "mtp", 3, predictors=3),
    Run("deepseek_v32", "mtp", 2, predictors=3),
    Run("glm_moe_dsa", "mtp", 2, cache="fp8"),
    Run("deepseek_v32", NGRAM, cache="fp8"),
)
DRAWN = drawn(RUNS, 2, "drafts beside sparse latent attention")
READERS = [run for run in DRAWN if run.method == "mtp" and not run.shared]
PREDICTOR = "model.layers.3.self_attn.indexer"
FAULTS = ({"index_topk": WRONG}, {"mla_sparse": WRONG})
"""In the model and its predictor."""
SPOILED = {f"index_topk@{PREDICTOR}": WRONG}
"""In the predictor alone."""


@pytest.mark.engine
class TestDrafts(Drafting):
    RUNS = DRAWN
    PASSES = 2
    PLACE = {"plugins": ("wrong_plugin",), "deny": "wrong"}

    def models(self, run: Run, folder: Path) -> Models:
        plain = build_checkpoint(run.family, folder / "plain")
        if run.method == NGRAM:
            repeating = drafters.repeating(plain, folder / "repeating")
            return Models(repeating, repeating, None)
        reader = drafters.with_reader(plain, folder / "reader", run.predictors)
        return Models(reader, reader, reader)

    def options(self, run: Run, made: Models, drafts: bool) -> Mapping[str, Any]:
        compiled = {"compilation_config": {"mode": 3, "backend": "eager"}} if run.compiled else {}
        engine = {
            "max_num_seqs": 1 if run.alone else 64,
            "max_num_batched_tokens": 64,
            "enforce_eager": not run.compiled,
            "tensor_parallel_size": run.ranks,
            "kv_cache_dtype": run.cache,
            "attention_config": {"sparse_mla_force_mqa": run.cache != "auto"},
            **compiled,
        }
        if not drafts:
            return engine
        who = LOOK_UP if made.drafter is None else {"model": str(made.drafter)}
        shared = {"index_share_for_mtp_iteration": True} if run.shared else {}
        speculation = {"method": run.method, "num_speculative_tokens": run.tokens, **who, **shared}
        return {**engine, "speculative_config": speculation}

    def last(self, run: Run) -> Sequence[Pass]:
        counted = Pass(LONG.prompts, LONG.max_tokens, drafts=True)
        spoiled = [counted, replace(counted, orders=SPOILED)] if run in READERS else []
        return [*spoiled, *(Pass(SHORT.prompts, SHORT.max_tokens, orders=wrong) for wrong in FAULTS)]

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
            assert max(engine.answers[1].cached) > 300

    def test_a_wrong_implementation_changes_the_tokens(
        self, run: Run, served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        drafted = served(run)[0]
        right, *wrong = (drafted.answers[number].tokens for number in (0, -2, -1))
        assert [tokens != right for tokens in wrong] == [True, True]

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

    @pytest.mark.parametrize("reader", READERS, ids=str)
    def test_a_predictor_that_reads_as_its_model_does_is_right_unless_its_lists_are_wrong(
        self, reader: Run, served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        drafted = served(reader)[0]
        counts = torch.tensor([answer.drafts for answer in drafted.answers if answer.drafts])
        right, spoiled = (accepted / made for accepted, made in counts.diff(dim=0).tolist())
        assert spoiled < right
        assert right > (0.6 if reader.predictors == 1 else 0.4)  # each further one lacks a further token at the start
        assert {tuple(map(tuple, answer.tokens)) for answer in drafted.answers if answer.drafts} == {
            tuple(map(tuple, drafted.answers[2].tokens))
        }

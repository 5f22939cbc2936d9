"""A latent cache in fp8: the right and wrong results of an engine with one request at a time.

A step with several tokens of a request reads their own latents unrounded and earlier latents from the cache; a step
with one token reads all latents from the cache. The right result is Hugging Face's, with latents rounded in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fl_dispatch.cli.half_precision import LARGEST, MEAN
from host_engines import WRONG, Answer, Call, Engine, Host, Pass, Scenario, Served, clean, ran
from quantized_mixture import LATENT_LAYERS, latent
from quantized_network import CHUNK, Computed, computed, distance, network, scores, with_fp8_latents
from running import MAX_TOKENS, PROMPTS

OPERATORS = ("kv_cache_write", "mla_decode", "mla_prefill")
BLOCK = 16
"""Tokens of a block."""
ENGINE = {"kv_cache_dtype": "fp8", "max_num_seqs": 1, "max_num_batched_tokens": CHUNK}
ALL_ONE = (1.0,) * LATENT_LAYERS
SCALES = (0.011, 0.017, 0.023)
PLANTED = 1.1
"""The factor of wrong scales."""


def own(tokens: int, cached: int = 0) -> list[int]:
    """Return for each token of a text the first token with latents that its step reads unrounded."""
    prompt = tokens - MAX_TOKENS
    ends = sorted({*range(CHUNK, cached, CHUNK), *range(cached, prompt, CHUNK), prompt} - {0})
    firsts: list[int] = []
    for end in ends:
        begin = len(firsts)
        firsts += [begin if end - begin > 1 else end] * (end - begin)
    return [*firsts, *range(prompt + 1, tokens + 1)]


def rounded(
    model: Path,
    scales: Sequence[float],
    of: Callable[[int], Sequence[int]] = own,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return a checkpoint's network with a latent cache in fp8."""
    return with_fp8_latents(network(None, model=model, dtype=dtype), scales, None if of is read_from_cache else of)


def is_as_near_in_bfloat16(model: Path, texts: Sequence[Sequence[int]], got: Tensor) -> bool:
    """Whether an engine in bfloat16 is about as near to the network in float32 as Hugging Face's in bfloat16."""
    exact = scores(rounded(model, ALL_ONE), texts)
    theirs = scores(rounded(model, ALL_ONE, dtype=torch.bfloat16), texts)
    mean = (got - exact).abs().mean() <= MEAN * (theirs - exact).abs().mean()
    return bool(mean) and distance(got, exact) <= LARGEST * distance(theirs, exact)


def read_from_cache(tokens: int) -> range:
    """Return the same as :func:`own` for steps that read all latents from the cache."""
    return range(1, tokens + 1)


def chosen(model: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens that the network which reads all latents from such a cache chooses at each place of answers."""
    made = rounded(model, ALL_ONE, read_from_cache)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = made(torch.tensor([[*prompt, *answer]])).logits
        found.append(logits[0, len(prompt) - 1 : -1].argmax(-1).tolist())
    return found


def others(
    model: Path, scales: Sequence[float], texts: Sequence[Sequence[int]], of: Callable[[int], Sequence[int]] = own
) -> dict[str, Tensor]:
    """Return log-probabilities of networks with other caches."""
    plain = network(None, model=model)
    found = {
        "not quantized": scores(plain, texts),
        "other scales": scores(rounded(model, [PLANTED * scale for scale in scales], of), texts),
    }
    if not hasattr(plain.config, "index_topk"):  # lists depend on stored latents
        found["other steps"] = scores(rounded(model, scales, read_from_cache if of is own else own), texts)
    if len({*scales}) > 1:
        found["scales of the layer before"] = scores(rounded(model, (scales[-1], *scales[:-1]), of), texts)
    return found


def behind(model: Path, scales: Sequence[float], found: Answer) -> float:
    """Return the largest log-probability difference from a network that reads the same latents from a cache."""
    largest = 0.0
    for prompt, tokens, row, cached in zip(found.prompts, found.tokens, found.rows, found.cached, strict=True):
        made = rounded(model, scales, lambda n, cached=cached: own(n, cached))
        right = scores(made, [[*prompt, *tokens]])[-MAX_TOKENS:]
        largest = max(largest, float((torch.tensor(row) - right).abs().max()))
    return largest


@dataclass(frozen=True, eq=False)
class Run:
    """An engine with a latent cache in fp8.

    Args:
        name: the run's name.
        engine: further arguments of the host's engine.
        scales: scales of the layers; values other than 1 are set in the engine, because no checkpoint has them.
        half: whether the engine computes in bfloat16.
    """

    name: str
    engine: Mapping[str, Any]
    scales: Sequence[float] = ALL_ONE
    half: bool = False

    def __str__(self) -> str:
        return self.name


class LatentCaches(Scenario):
    """Each run has two passes, so that the second one finds its prompts in the cache."""

    RUNS: ClassVar[Sequence[Run]]
    OPERATORS: ClassVar[Sequence[str]] = OPERATORS
    WRONG: ClassVar[Run | None] = None
    """The run with additional passes for wrong implementations of each operator."""
    READS: ClassVar[Callable[[int], Sequence[int]]] = staticmethod(own)
    """A function like :func:`own`."""
    PLACE: ClassVar[Mapping[str, str]] = {}
    """Further arguments of ``Host.serve``."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {
            "single": [run for run in self.RUNS if not run.half],
            "half": [run for run in self.RUNS if run.half],
            "operator": self.OPERATORS if self.WRONG else (),
            "run": self.RUNS,
        }

    def scaled(self, scales: Sequence[float]) -> Call:
        """Set the layers' scales."""
        return Call("rpc", {"method": "set_latent_scales", "args": [[*scales]]})

    def asked(self, run: Run) -> list[Pass | Call]:
        """Return two passes, with scales one that reads with other scales than it wrote, and one per wrong operator.

        The pass with a write that writes nothing comes after that of a wrong attention, to find wrong latents.
        """
        found: list[Pass | Call] = [Pass(scores=True), Pass()]
        if run.scales is not ALL_ONE:
            planted = self.scaled([PLANTED * scale for scale in run.scales])
            found = [self.scaled(run.scales), *found, planted, Pass()]
        wrong = reversed(self.OPERATORS if run is self.WRONG else ())
        return [*found, *(Pass(orders={operator: WRONG}) for operator in wrong)]

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return latent(tmp_path_factory.mktemp("latent") / "whole")

    @pytest.fixture(scope="class")
    def served(self, host: Host, model: Path) -> Callable[[Run], Served]:
        engines = (Engine(model, self.asked(run), run.engine) for run in self.RUNS)
        place = self.PLACE or {"plugins": ["wrong_plugin"], "deny": "wrong"}
        started = dict(zip(self.RUNS, host.serve(*engines, **place), strict=True))
        return lambda run: started[run].result()

    @pytest.fixture(scope="class")
    def passes(self, served: Callable[[Run], Served]) -> Callable[[Run], list[Answer]]:
        """Return the answers to a run's passes."""

        def of(run: Run) -> list[Answer]:
            pairs = zip(self.asked(run), served(run).answers, strict=True)
            return [answer for asked, answer in pairs if isinstance(asked, Pass)]

        return of

    @pytest.fixture(scope="class")
    def right(
        self, model: Path, passes: Callable[[Run], list[Answer]]
    ) -> Callable[[Run], tuple[list[list[int]], Tensor, Computed]]:
        """Return a run's texts, its log-probabilities, and the network's."""

        @cache
        def of(run: Run) -> tuple[list[list[int]], Tensor, Computed]:
            texts, got = passes(run)[0].scored()
            return texts, got, computed(rounded(model, run.scales, self.READS), texts)

        return of

    def test_it_computes_what_the_network_with_rounded_latents_does(
        self, single: Run, right: Callable[[Run], Any], model: Path
    ) -> None:
        texts, got, there = right(single)
        assert distance(got, there.scores) <= there.rounding
        for other, wrong in others(model, single.scales, texts, self.READS).items():
            assert distance(got, wrong) > there.rounding, other
        assert there.decides(PROMPTS, MAX_TOKENS)

    def test_a_prompt_is_found_in_the_cache(self, run: Run, passes: Callable[[Run], list[Answer]]) -> None:
        first, again = passes(run)[:2]
        assert first.cached == [0] * len(PROMPTS)
        assert max(again.cached) >= 320

    def test_in_bfloat16_it_is_as_near_as_hugging_faces_network(
        self, half: Run, model: Path, passes: Callable[[Run], list[Answer]]
    ) -> None:
        assert is_as_near_in_bfloat16(model, *passes(half)[0].scored())

    def test_the_operators_ran_on_it(self, run: Run, host: Host, served: Callable[[Run], Served]) -> None:
        for report in served(run).reports:
            assert all(ran(report).get(operator) for operator in self.OPERATORS)
            assert clean(report, host)

    def test_a_wrong_implementation_changes_the_tokens(
        self, operator: str, served: Callable[[Run], Served], passes: Callable[[Run], list[Answer]]
    ) -> None:
        assert self.WRONG is not None
        first, *_ = found = passes(self.WRONG)
        assert found[-1 - self.OPERATORS.index(operator)].tokens != first.tokens
        assert served(self.WRONG).counted(operator) > 0


class LatentCachesOfVLLM(LatentCaches):
    """Latent caches of vLLM; steps read their own latents unrounded, so answers depend on the prefix cache."""

    def test_a_prompt_found_in_the_cache_is_read_as_it_was_stored(
        self, single: Run, right: Callable[[Run], Any], passes: Callable[[Run], list[Answer]], model: Path
    ) -> None:
        """Compare prompts of at least one block with a network of the same cached latents; other scales differ."""
        _, _, there = right(single)
        _, again, *planted = passes(single)[: 3 if single.scales is not ALL_ONE else 2]
        assert again.cached == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
        assert behind(model, single.scales, again) <= 2 * there.largest
        for wrong in planted:
            assert behind(model, single.scales, wrong) > 2 * there.largest

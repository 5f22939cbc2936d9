"""The perplexity of held-out text under each quantization is that of the dequantized network, in every dtype.

An engine of each scheme and dtype scores the text, and once more with products that are slightly wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import pytest

import quantized_checkpoints as checkpoints
import scoring
from fl_dispatch.evidence.perplexity import TOLERANCE, relative_difference
from host_engines import Answer, Engine, Host, Pass, Scenario, Served, clean
from quantized_checkpoints import SCHEMES
from quantized_network import network, right_perplexity, tolerance

COARSE = [name for name, scheme in SCHEMES.items() if scheme.layer == "Float4Layer" and scheme.rows is not None]
"""Schemes with inputs of e2m1. A half type's rounding moves these by a quarter of an element or more, which changes
Hugging Face's own perplexity by nearly 1 %."""
CASES = [(name, dtype) for name in SCHEMES for dtype in TOLERANCE if dtype == "float32" or name not in COARSE]
SHRUNK = "reference.shrunk"
"""The products of ``shrunk_products``."""


@cache
def right(scheme: str) -> float:
    return right_perplexity(network(SCHEMES[scheme]))


def apart(scheme: str, answer: Answer) -> float:
    """Return the relative difference of an answer's perplexity from the network's."""
    return relative_difference(scoring.perplexity_of(answer), right(scheme))


class QuantizedPerplexity(Scenario):
    """Perplexities of the host's cases ``DRAWN`` from :data:`CASES`; ``OPTIONS``: further arguments of each engine."""

    DRAWN: ClassVar[Sequence[tuple[str, str]]]
    OPTIONS: ClassVar[Mapping[str, Any]] = {}

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"scheme,dtype": self.DRAWN}

    @pytest.fixture(scope="class")
    def served(self, host: Host, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Served]:
        folder, started = tmp_path_factory.mktemp("quantized"), {}
        asked = Pass(scoring.rows(), max_tokens=1, scores=True)
        for number, (scheme, dtype) in enumerate(self.DRAWN):
            written = checkpoints.write_checkpoint(folder / str(number), SCHEMES[scheme])
            wrong = Pass(scoring.rows(), 1, True, {SCHEMES[scheme].operators[-1]: SHRUNK}, prefer="")
            engine = Engine(written, [asked, wrong], {**self.OPTIONS, "dtype": dtype})
            (started[scheme, dtype],) = host.serve(engine, plugins=["shrunk_products"])
        return lambda *case: started[case].result()

    def test_the_perplexity_is_the_dequantized_networks(
        self, scheme: str, dtype: str, host: Host, served: Callable[[str, str], Served]
    ) -> None:
        found = served(scheme, dtype)
        assert apart(scheme, found.answers[0]) <= tolerance(SCHEMES[scheme], dtype)
        assert all(clean(report, host) for report in found.reports)

    def test_a_product_that_is_slightly_wrong_is_noticed(
        self, scheme: str, dtype: str, served: Callable[[str, str], Served]
    ) -> None:
        found = served(scheme, dtype)
        assert apart(scheme, found.answers[1]) > 2 * tolerance(SCHEMES[scheme], dtype)
        assert found.counted(SCHEMES[scheme].operators[-1], SHRUNK) > 0

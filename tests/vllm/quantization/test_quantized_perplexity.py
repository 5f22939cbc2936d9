"""The perplexity of held-out text under each quantization is that of the dequantized network, in every dtype.

An engine of each drawn scheme and dtype scores the text, and once more with products that are slightly wrong.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from engines import ran, start_features

import quantized_checkpoints as checkpoints
import scoring
from fl_dispatch.evidence.perplexity import TOLERANCE
from quantized_checkpoints import SCHEMES
from quantized_network import network, right_perplexity, tolerance
from sampling import drawn

pytestmark = pytest.mark.engine
CASES = drawn([(name, dtype) for name in SCHEMES for dtype in TOLERANCE], 2, "perplexities of quantized models")
each_case = pytest.mark.parametrize("case", CASES, ids=", ".join)
WRONG = ["impl:reference.shrunk"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    folder = tmp_path_factory.mktemp("quantized")
    places = {name: folder / name.replace(" ", "-") for name in dict(CASES)}
    for name, place in places.items():
        checkpoints.write_checkpoint(place, SCHEMES[name])
    engine = {"max_num_batched_tokens": 1024, "enable_prefix_caching": False}
    runs = {}
    for name, dtype in CASES:
        wrong = {"do": "policy", "per_op_order": {SCHEMES[name].operators[-1]: WRONG}}
        steps = [scoring.step(), wrong, scoring.step()]
        run = places[name], steps, {**engine, "dtype": dtype}
        runs[name, dtype] = start_features(run, VLLM_FL_PLUGIN_MODULES="shrunk_products")
    return {case: started.result()["runs"][0] for case, started in runs.items()}


@cache
def right(name: str) -> float:
    return right_perplexity(network(SCHEMES[name]))


@each_case
def test_the_perplexity_is_the_dequantized_networks(case: tuple[str, str], answers: dict[tuple[str, str], Any]) -> None:
    name, dtype = case
    found = answers[case]
    assert scoring.difference(found["steps"][0], right(name)) <= tolerance(SCHEMES[name], dtype)
    assert found["report"]["failed"] == found["report"]["native_layers"] == {}


@each_case
def test_a_product_that_is_slightly_wrong_is_noticed(
    case: tuple[str, str], answers: dict[tuple[str, str], Any]
) -> None:
    name, dtype = case
    found = answers[case]
    assert scoring.difference(found["steps"][2], right(name)) > 2 * tolerance(SCHEMES[name], dtype)
    assert "reference.shrunk" in ran(found, SCHEMES[name].operators[-1])

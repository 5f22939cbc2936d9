"""The perplexity of held-out text under each quantization is that of the dequantized network, in every dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import start

import quantized_checkpoints as checkpoints
import scoring
from fl_dispatch.evidence.perplexity import TOLERANCE, relative_difference
from quantized_checkpoints import SCHEMES
from quantized_network import network, right_perplexity, tolerance
from sampling import drawn

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("name", "dtype"),
    drawn([(name, dtype) for name in SCHEMES for dtype in TOLERANCE], 1, "perplexities of quantized models, SGLang"),
)
def test_it_is_that_and_a_product_that_is_slightly_wrong_is_noticed(name: str, dtype: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    folder = checkpoints.write_checkpoint(tmp_path / "checkpoint", scheme)
    step = {**scoring.SGLANG_STEP, "prompts": scoring.rows()}
    wrong = {"per_op_order": {scheme.operators[-1]: ["impl:reference.shrunk"]}}
    plugins = {"SGLANG_FL_PLUGIN_MODULES": "shrunk_products,policy_method"}
    got = start(folder, step, {**step, "policy": wrong}, variables=plugins, engine={"dtype": dtype}).result()
    right, limit = right_perplexity(network(scheme)), tolerance(scheme, dtype)
    apart = [relative_difference(scoring.found_by_sglang(answer), right) for answer in got["steps"]]
    assert apart[0] <= limit
    assert apart[1] > 2 * limit
    assert got["report"]["counts"][f"{scheme.operators[-1]} reference.shrunk"] > 0

"""gpt-oss in SGLang's engines as its checkpoint is published: on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import start

import gpt_oss
from quantized_engines import divisible

TWO = {"tp_size": 2}


@pytest.mark.engine
class TestGptOss(gpt_oss.GptOss):
    KINDS = {gpt_oss.ONE: {}, "each expert divided": TWO, "the experts divided": {**TWO, "ep_size": 2}}


@pytest.mark.engine
def test_another_model_in_mxfp4_is_refused(tmp_path: Path) -> None:
    model = gpt_oss.announced(divisible(tmp_path / "llama"))
    with pytest.raises(AssertionError, match="quantization 'mxfp4' of another model than gpt-oss"):
        start(model).result()

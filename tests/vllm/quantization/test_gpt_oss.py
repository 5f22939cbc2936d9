"""gpt-oss in vLLM's engines as its checkpoint is published: eager, compiled, and on two ranks."""

from __future__ import annotations

import pytest

import gpt_oss

TWO = {"tensor_parallel_size": 2}


@pytest.mark.engine
class TestGptOss(gpt_oss.GptOss):
    KINDS = {
        gpt_oss.ONE: {},
        "compiled": {"enforce_eager": False},
        "each expert divided": TWO,
        "the experts divided": {**TWO, "enable_expert_parallel": True},
    }

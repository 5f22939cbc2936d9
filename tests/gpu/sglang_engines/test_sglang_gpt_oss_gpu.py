"""gpt-oss in MXFP4 in SGLang on a GPU, from graphs: Hugging Face's tokens in float32 by our kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from sglang_on_gpu import NEUTRAL, OURS, all_is_ours, replayed

import gpt_oss
from host_engines import Engine, Host, Pass, Served, ran
from running import MAX_TOKENS, expected_tokens

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("gpt-oss")
    published = gpt_oss.write_checkpoint(root / "published")
    return {"published": published, "plain": gpt_oss.dequantized(published, root / "dequantized")}


@pytest.fixture(scope="module")
def served(host: Host, models: Mapping[str, Path]) -> Callable[[], Served]:
    (found,) = host.serve(Engine(models["published"], [Pass(), Pass()]), **NEUTRAL)
    return found.result


def test_tokens_equal_those_of_the_dequantized_network(
    served: Callable[[], Served], models: Mapping[str, Path]
) -> None:
    assert [answer.tokens for answer in served().answers] == 2 * [expected_tokens(models["plain"])]


def test_our_kernels_ran_from_graphs(served: Callable[[], Served]) -> None:
    report = served().reports[0]
    assert all_is_ours(dict(report))
    assert {operator: ran(report)[operator] for operator in gpt_oss.ASKED_WRONG} == dict.fromkeys(
        gpt_oss.ASKED_WRONG, OURS
    )
    assert replayed(dict(report), 2 * (MAX_TOKENS - 1))

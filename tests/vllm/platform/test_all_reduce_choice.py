"""The out-of-tree platform's log lines about vLLM's own all-reduce, which it cannot have."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fl_dispatch.devices import CUDA
from vllm_fl.compilation import compile
from vllm_fl.platform import config


@pytest.fixture(autouse=True)
def _nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "is_compiled", lambda vllm_config: False)
    monkeypatch.setattr(config, "_adapt_graphs", lambda *given: None)
    monkeypatch.setattr(config, "is_packed", lambda vllm_config: True)  # the model runner was said before


def asked_for(ranks: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            worker_cls="given", disable_custom_all_reduce=False, tensor_parallel_size=ranks
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=False),
        model_config=None,
        cache_config=None,
    )


@pytest.mark.parametrize(("ranks", "advised"), [(1, False), (2, True)])
def test_several_gpus_are_told_of_the_platform_that_keeps_it(
    caplog: pytest.LogCaptureFixture, ranks: int, advised: bool
) -> None:
    given = asked_for(ranks)
    with caplog.at_level("INFO", logger="vllm_fl"):
        config.adapt(given, CUDA)
    assert given.parallel_config.disable_custom_all_reduce
    assert ("VLLM_FL_NATIVE_PLATFORM=1" in caplog.text) is advised


def test_other_chips_have_no_such_platform(caplog: pytest.LogCaptureFixture) -> None:
    given = asked_for(2)
    with caplog.at_level("INFO", logger="vllm_fl"):
        config.adapt(given, replace(CUDA, native_platforms={}))
    assert given.parallel_config.disable_custom_all_reduce
    assert "VLLM_FL_NATIVE_PLATFORM" not in caplog.text


def test_the_native_platform_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    given = asked_for(2)
    with caplog.at_level("INFO", logger="vllm_fl"):
        config.adapt(given, CUDA, native=True)
    assert not given.parallel_config.disable_custom_all_reduce
    assert not caplog.text

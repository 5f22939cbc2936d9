"""Checkpoints and expected tokens, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from engines import expected_tokens, pool

pytest.importorskip("vllm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "checkpoint" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)


def pytest_sessionfinish() -> None:
    """Engines that are still waiting for their turn are not started any more."""
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model family → its small checkpoint."""
    from fl_dispatch.cli.checkpoints import build_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda family: build_checkpoint(family, folder / family))


@pytest.fixture(scope="session")
def expected(checkpoint: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """Model family → Hugging Face's tokens for the standard prompts."""
    return cache(lambda family: expected_tokens(checkpoint(family)))

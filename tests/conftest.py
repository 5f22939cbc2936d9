"""What the tests of the core and of both hosts share: checkpoints and expected tokens, made once, and a library."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from running import WORKERS, expected_tokens, pool

HERE = Path(__file__).parent

# A host that is not installed; its folder here would pass for a namespace package of that name.
collect_ignore = [host for host in ("vllm", "sglang") if getattr(find_spec(host), "origin", None) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of engines. Where several workers share the files, those with most of them come first."""
    for item in items:
        if HERE in item.path.parents and "checkpoint" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
    if WORKERS > 1:
        engines = Counter(item.path for item in items if item.get_closest_marker("engine"))
        items.sort(key=lambda item: -engines[item.path])


def pytest_configure() -> None:
    """Workers leave a record of themselves for ``fl doctor``: those of tests not among the user's own."""
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fl-state-")


def pytest_sessionfinish() -> None:
    """Engines that are still waiting for their turn are not started any more."""
    pool.shutdown(wait=False, cancel_futures=True)
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


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


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles the stand-in for FlagCX, as the library of its source tree, with some macros defined."""

    def build(*macros: str) -> Path:
        root = tmp_path_factory.mktemp("flagcx")
        library = root / "build/lib/libflagcx.so"
        library.parent.mkdir(parents=True)
        flags = [f"-D{macro}" for macro in macros]
        source = HERE / "native/flagcx_standin.cpp"
        subprocess.run(["c++", "-O1", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
        return root

    return build

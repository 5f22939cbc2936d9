"""Fixtures of the core and of both hosts: checkpoints and expected tokens, made once, and a library."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from processes import pool
from running import expected_tokens

HERE = Path(__file__).parent
pytest.register_assert_rewrite(*(path.stem for path in (HERE / "scenarios").rglob("*.py")))  # they hold rules

# A host that is not installed; its folder here would pass for a namespace package of that name.
collect_ignore = [host for host in ("vllm", "sglang") if getattr(find_spec(host), "origin", None) is None]

_records: list[dict[str, object]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of engines."""
    for item in items:
        if HERE in item.path.parents and "checkpoint" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)


def pytest_configure() -> None:
    """Workers leave a record of themselves for ``fl doctor``: those of tests not among the user's own.

    Nor do tests read the user's tuned files. Ctrl-C is heard as in a terminal, by this process and those that it
    starts: one that a script starts in the background is born deaf to it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fl-state-")
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="fl-config-")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _records.append({"test": report.nodeid, "part": report.when, "outcome": report.outcome, "seconds": report.duration})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:  # a whole file
        _records.append({"test": report.nodeid, "part": "setup", "outcome": "skipped", "seconds": 0.0})


def pytest_sessionfinish() -> None:
    """Engines that still wait for their turn are not started any more; the suite reads what each test took."""
    pool.shutdown(wait=False, cancel_futures=True)
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)
    if "FL_SUITE_RECORDS" in os.environ:
        Path(os.environ["FL_SUITE_RECORDS"]).write_text(json.dumps(_records))


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what is made once: in a run of the whole suite, once for all tests of an environment."""
    if "FL_SUITE" not in os.environ:
        return tmp_path_factory.mktemp("scratch")
    folder = Path(os.environ["FL_SUITE"])
    folder.mkdir(exist_ok=True)
    return folder


def _once(target: Path, make: Callable[[Path], object]) -> Path:
    """A path at which ``make`` has put something, unless another process had done so."""
    from filelock import FileLock

    with FileLock(f"{target}.lock"):
        if not target.exists():
            part = target.with_name(f"{target.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.rename(target)
    return target


@pytest.fixture(scope="session")
def checkpoint(scratch: Path) -> Callable[[str], Path]:
    """Model family → its small checkpoint."""
    from fl_dispatch.cli.checkpoints import build_checkpoint

    return cache(lambda family: _once(scratch / family, lambda folder: build_checkpoint(family, folder)))


@pytest.fixture(scope="session")
def expected(checkpoint: Callable[[str], Path], scratch: Path) -> Callable[[str], list[list[int]]]:
    """Model family → Hugging Face's tokens for the standard prompts."""

    def of(family: str) -> list[list[int]]:
        tokens = _once(
            scratch / f"{family}.tokens.json",
            lambda file: file.write_text(json.dumps(expected_tokens(checkpoint(family)))),
        )
        found: list[list[int]] = json.loads(tokens.read_text())
        return found

    return cache(of)


ADAPTERS = {"one": 1, "two": 2, "late": 3, "head": 3}
"""Names of LoRA adapters → the seeds of their numbers; "head" adapts the projection to the vocabulary too."""


@pytest.fixture(scope="session")
def adapter(checkpoint: Callable[[str], Path], scratch: Path) -> Callable[[str], Path]:
    """Name → an adapter of the checkpoint "qwen3"."""
    import variants

    def of(name: str) -> Path:
        products = (*variants.ADAPTED, "lm_head") if name == "head" else variants.ADAPTED
        model, seed = checkpoint("qwen3"), ADAPTERS[name]
        return _once(scratch / f"adapter {name}", lambda path: variants.adapter(model, path, seed, products))

    return cache(of)


@pytest.fixture(scope="session")
def adapted(
    checkpoint: Callable[[str], Path], adapter: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> Callable[[str | None], list[list[int]]]:
    """An adapter's name, or none → Hugging Face's tokens for the standard prompts, by the merged weights."""
    import variants

    def of(name: str | None) -> list[list[int]]:
        if name is None:
            return expected("qwen3")
        with tempfile.TemporaryDirectory() as folder:
            return expected_tokens(variants.merged(checkpoint("qwen3"), adapter(name), Path(folder, "merged")))

    return cache(of)


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

"""``vllm snapshot`` and ``vllm preload``, which vLLM has since 0.33, stop where the host asks for CUDA, and say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import python, unpacked

VERSION = "0.33"
PRELOAD = """
import sys
from vllm.entrypoints.cli.preload import PreloadSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
PreloadSubcommand.add_cli_args(parser)
PreloadSubcommand.cmd(parser.parse_args(sys.argv[1:]))
"""
SNAPSHOT = """
import sys
from vllm.entrypoints.cli.snapshot import SnapshotSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

command, parser = SnapshotSubcommand(create_requested=True), FlexibleArgumentParser()
command.subparser_init(parser.add_subparsers())
command.cmd(parser.parse_args(sys.argv[1:]))
"""
"""The commands themselves: the one that has all imports more of the newest host's requirements."""
SHARED = "platform 'cpu' does not support CUDA IPC weight sharing; only CUDA and ROCm are supported."
LOADS = """
from vllm import LLM
LLM(model={model!r}, load_format="ipc_cache", dtype="float32", enforce_eager=True, max_model_len=64)
"""


def test_weights_are_preloaded_for_cuda_alone(checkpoint: Callable[[str], Path]) -> None:
    """Line 87 of ``model_executor/model_loader/weight_cache/protocol.py``: the platform is no ``is_cuda_alike()``."""
    model = str(checkpoint("qwen3"))
    ended = python("-c", PRELOAD, "--model", model, "--max-model-len", "64", cold=True, **unpacked(VERSION))
    assert ended.returncode != 0
    assert SHARED in ended.log


def test_an_engine_asks_no_preloaded_weights_either(checkpoint: Callable[[str], Path]) -> None:
    """Line 223 of ``ipc_loader.py`` beside it asks the same."""
    model = str(checkpoint("qwen3"))
    ended = python("-c", LOADS.format(model=model), cold=True, **unpacked(VERSION))
    assert ended.returncode != 0
    assert SHARED in ended.log


@pytest.mark.parametrize(
    ("model", "revision", "said"),
    [
        ("nobody/nothing", "0" * 40, "snapshot dependency not found: "),
        ("nobody/nothing", "main", "snapshot create requires an immutable remote model and 40-character --revision"),
    ],
)
def test_a_snapshot_is_made_by_criu_and_cuda_checkpoint(
    model: str, revision: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines 227 and 448 of ``snapshot/runtime.py``: three programs, and a process that holds a CUDA device."""
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine that has them would get further
    asked = ("snapshot", "create", model, "--revision", revision, "--snapshot-dir", str(tmp_path / "made"))
    ended = python("-c", SNAPSHOT, *asked, cold=True, **unpacked(VERSION))
    assert ended.returncode != 0
    assert said in ended.log

"""A server on a GPU whose request has NaN in its logits goes on with the others, eagerly and from captured graphs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from damaged import ends_alone
from engines import expected_tokens
from served import Server

from fl_dispatch.cli.checkpoints import build_checkpoint
from poison import variables

pytestmark = pytest.mark.gpu
SHARE = ("--gpu-memory-utilization", "0.1")
WAYS = {"eager, V1": ("0",), "eager, V2": ("1",), "graphs, V2": ("1", "--no-enforce-eager")}


@pytest.mark.parametrize("way", WAYS)
def test_a_request_with_nan_ends_alone_with_its_origin_and_nothing_of_it_stays(way: str, tmp_path: Path) -> None:
    model = build_checkpoint("qwen3", tmp_path / "qwen3")
    v2, *options = WAYS[way]
    given = variables(model, tmp_path, VLLM_USE_V2_MODEL_RUNNER=v2)
    server = Server(model, tmp_path / "log.txt", tempfile.mkdtemp(prefix="fl-state-"), given, (*SHARE, *options))
    try:
        ends_alone(server, expected_tokens(model))
    finally:
        server.end()

"""In a running ``vllm serve`` a request with NaN in its logits ends alone, or is computed again; the others go on."""

from __future__ import annotations

import json
import tempfile
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engines import PROMPTS
from safetensors import safe_open
from served import Server

POISON = 450
"""A token of no prompt and of no right answer."""
COMMON = PROMPTS[2][:64]
POISONED = [*COMMON, POISON, *PROMPTS[1]]
INNOCENT = [*COMMON, *PROMPTS[1]]
ORIGIN = {"operator": "rms_norm", "implementation": "vendor.poison", "layer": "model.layers.0.input_layernorm"}


def variables(model: Path, folder: Path, **more: str) -> dict[str, str]:
    with safe_open(model / "model.safetensors", "pt") as tensors:
        torch.save(tensors.get_tensor("model.embed_tokens.weight")[POISON].float(), folder / "poison.pt")
    policy = {"VLLM_FL_PLUGIN_MODULES": "poisoned_norm", "VLLM_FL_PER_OP": "rms_norm=vendor:poison|reference"}
    return {**policy, "POISON": str(folder / "poison.pt"), **more}


WAYS = {
    "V1": ("0",),
    "V2": ("1",),
    "two ranks": ("1", "--tensor-parallel-size", "2"),
    "compiled": ("1", "--no-enforce-eager"),
}


@pytest.fixture(scope="module", params=WAYS)
def server(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    model, folder = checkpoint("qwen3"), tmp_path_factory.mktemp("damage")
    v2, *options = WAYS[request.param]
    given = variables(model, folder, VLLM_USE_V2_MODEL_RUNNER=v2)
    running = Server(model, folder / "log.txt", tempfile.mkdtemp(prefix="fl-state-"), given, options)
    yield running
    running.end()


def refused(server: Server, prompt: list[int]) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.tokens(prompt)
    return raised.value.code, json.loads(raised.value.read())["error"]["message"]


def test_a_request_with_nan_ends_alone_with_its_origin_and_nothing_of_it_stays(
    server: Server, expected: Callable[[str], list[list[int]]]
) -> None:
    right = expected("qwen3")
    alone = server.tokens(INNOCENT)
    with ThreadPoolExecutor(3) as clients:
        others = [clients.submit(server.tokens, PROMPTS[row]) for row in (0, 1)]
        code, why = clients.submit(refused, server, POISONED).result()
        answers = [other.result() for other in others]
    assert answers == right[:2]
    assert code == 500
    assert why == (
        "its logits have NaN or infinity: they began in 'rms_norm' by 'vendor.poison' in model.layers.0.input_layernorm"
    )
    assert server.tokens(INNOCENT) == alone  # it has the blocks of the common beginning of both
    assert refused(server, POISONED) == (code, why)
    assert server.tokens(PROMPTS[2]) == right[2]  # in blocks that were the ended requests'
    labels = {**ORIGIN, "rank": "0"}
    assert server.until("fl_damage_total", labels, 2.0) == 2
    assert server.metric("vllm:corrupted_requests_total", {"engine": "0", "model_name": "tiny"}) == 2
    assert server.log.read_text().count("it is computed again and watched") == 2


def test_a_fault_that_does_not_come_again_is_repaired_by_default(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoint("qwen3")
    given = variables(model, tmp_path, POISON_TIMES="1")
    server = Server(model, tmp_path / "log.txt", tempfile.mkdtemp(prefix="fl-state-"), given)
    try:
        first = server.tokens(POISONED)
        assert "it is computed again and watched" in server.log.read_text()
        assert server.tokens(POISONED) == first
    finally:
        server.end()


def test_where_damage_is_ignored_vllm_answers_as_it_does(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoint("qwen3")
    given = variables(model, tmp_path, VLLM_FL_DAMAGED_REQUESTS="ignore")
    server = Server(model, tmp_path / "log.txt", tempfile.mkdtemp(prefix="fl-state-"), given)
    try:
        assert len(server.tokens(POISONED)) == 16
        assert "NaN" not in server.log.read_text()
    finally:
        server.end()

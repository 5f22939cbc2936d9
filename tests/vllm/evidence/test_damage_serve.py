"""In a running ``vllm serve`` a request with NaN in its logits ends alone, or is computed again; the others go on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from damaged import POISONED, ends_alone
from served import Server

from poison import variables

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


def test_a_request_with_nan_ends_alone_with_its_origin_and_nothing_of_it_stays(
    server: Server, expected: Callable[[str], list[list[int]]]
) -> None:
    ends_alone(server, expected("qwen3"))


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

"""``vllm serve`` answers the OpenAI client with Hugging Face's tokens, streaming too, to whoever has the key."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PLUGINS, PROMPTS, environment, serve_command

from processes import free_port

openai = pytest.importorskip("openai")
READY_WITHIN = 240.0
KEY = "open-sesame"


@pytest.fixture(scope="module")
def stat_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the stat logger of another distribution, beside it, writes."""
    folder = tmp_path_factory.mktemp("stat_logger")
    info = folder / "fl_stat-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fl-stat\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.stat_logger_plugins]\nfile = stat_logger:FileStatLogger\n")
    return folder / "tokens.txt"


@pytest.fixture(scope="module")
def client(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, stat_log: Path
) -> Iterator[Any]:
    """An OpenAI client of a running server."""
    port = free_port()
    model = str(checkpoint("qwen3"))
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "67108864"]
    command = [sys.executable, *serve_command(model), "--served-model-name", "tiny"]
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY, *options],
            env=environment(
                VLLM_ENABLE_V1_MULTIPROCESSING="1",
                STAT_LOGGER_FILE=str(stat_log),
                PYTHONPATH=os.pathsep.join(
                    filter(None, (str(stat_log.parent), str(PLUGINS), os.environ.get("PYTHONPATH")))
                ),
            ),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait(f"http://127.0.0.1:{port}/health", server, log)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-4000:]}")


ASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": MAX_TOKENS,
    "temperature": 0.0,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


@pytest.mark.parametrize("row", range(len(PROMPTS)))
def test_a_completion_has_the_tokens_of_hugging_face(
    row: int, client: Any, expected: Callable[[str], list[list[int]]]
) -> None:
    answer = client.completions.create(prompt=PROMPTS[row], **ASK)
    assert answer.choices[0].token_ids == expected("qwen3")[row]


def test_a_streamed_completion_has_the_same_tokens(client: Any, expected: Callable[[str], list[list[int]]]) -> None:
    tokens: list[int] = []
    chunks = 0
    for chunk in client.completions.create(prompt=PROMPTS[1], stream=True, **ASK):
        tokens += chunk.choices[0].token_ids or []
        chunks += 1
    assert tokens == expected("qwen3")[1]
    assert chunks > 1


def test_chat_answers_and_streams_the_same_text(client: Any) -> None:
    ask = {**ASK, "messages": [{"role": "user", "content": "hello world"}]}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **ask)]
    assert whole
    assert "".join(parts) == whole


def test_without_the_key_a_request_is_refused(client: Any) -> None:
    stranger = openai.OpenAI(base_url=client.base_url, api_key="another", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.completions.create(prompt=PROMPTS[0], **ASK)
    assert client.models.list().data[0].id == "tiny"


def test_a_stat_logger_of_another_plugin_counts_the_tokens(client: Any, stat_log: Path) -> None:
    def counted() -> int:
        return sum(map(int, stat_log.read_text().split()))

    before = counted()
    client.completions.create(prompt=PROMPTS[0], **ASK)
    assert counted() == before + MAX_TOKENS

"""``vllm serve`` answers the OpenAI client with Hugging Face's tokens, streaming too, to whoever has the key.

In development mode it also sleeps, pauses, takes a trainer's weights and writes profiles, by routes without the key.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from engines import MAX_TOKENS, PLUGINS, PROMPTS, end, environment, expected_tokens, serve_command, wait_until_served

import distributions
import variants
from over_http import ASK, KEY, OverHTTP
from processes import free_port


@pytest.fixture(scope="module")
def stat_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the stat logger of another distribution, beside it, writes; the same one adds a route."""
    entries = "[vllm.stat_logger_plugins]\nfile = stat_logger:FileStatLogger\n"
    entries += "[vllm.endpoint_plugins]\ngreeting = endpoint:Greeting\n"
    return distributions.install(tmp_path_factory.mktemp("stat_logger"), "fl-stat", entries) / "tokens.txt"


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a collector of usage statistics, and what it got."""
    received: list[dict[str, Any]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def kv_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('kv')}/events"


@pytest.fixture(scope="module")
def events(kv_address: str) -> Iterator[Any]:
    """A subscriber to what happens in the KV cache."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.setsockopt(zmq.RCVTIMEO, 20_000)
        subscriber.connect(kv_address)
        yield subscriber


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the server and its processes write."""
    return tmp_path_factory.mktemp("serve") / "log.txt"


@pytest.fixture(scope="module")
def client(
    checkpoint: Callable[[str], Path],
    log: Path,
    stat_log: Path,
    collector: tuple[str, list[dict[str, Any]]],
    profiles: Path,
    kv_address: str,
) -> Iterator[Any]:
    """An OpenAI client of a running server."""
    port = free_port()
    model = str(checkpoint("qwen3"))
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "67108864"]
    options += ["--enable-tokenizer-info-endpoint", "--weight-transfer-config", json.dumps({"backend": "fl_shm"})]
    options += ["--profiler-config", json.dumps({"profiler": "torch", "torch_profiler_dir": str(profiles)})]
    published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": kv_address}
    options += ["--kv-events-config", json.dumps(published)]
    command = [sys.executable, *serve_command(model), "--served-model-name", "tiny"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY, *options],
            env=environment(
                VLLM_ENABLE_V1_MULTIPROCESSING="1",
                VLLM_FL_WIBBLE="1",
                VLLM_FL_NATIVE_PLATFORM="1",
                OMP_NUM_THREADS="2",
                VLLM_SERVER_DEV_MODE="1",
                VLLM_PLUGINS="fl,file,greeting",
                VLLM_NO_USAGE_STATS="0",
                VLLM_USAGE_STATS_SERVER=collector[0],
                VLLM_CONFIG_ROOT=str(stat_log.parent),
                STAT_LOGGER_FILE=str(stat_log),
                PYTHONPATH=os.pathsep.join(
                    filter(None, (str(stat_log.parent), str(PLUGINS), os.environ.get("PYTHONPATH")))
                ),
            ),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until_served(f"http://127.0.0.1:{port}", [server], [log])
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)
        finally:
            end(server)


class TestServer(OverHTTP):
    WARNED = ("VLLM_FL_WIBBLE", "VLLM_FL_NATIVE_PLATFORM")
    HOST_WARNS_TOO = True


def test_a_stat_logger_of_another_plugin_counts_the_tokens(client: Any, stat_log: Path) -> None:
    def counted() -> int:
        return sum(map(int, stat_log.read_text().split()))

    before = counted()
    client.completions.create(prompt=PROMPTS[0], **ASK)
    assert counted() == before + MAX_TOKENS


def test_a_route_of_another_plugin_answers_whoever_asks(client: Any) -> None:
    assert _ask(client, "greeting", post=False) == {"says": "tiny is served"}


# -- development mode -------------------------------------------------------------------------------------------------


def _ask(client: Any, path: str, *, post: bool = True) -> Any:
    """A route of the server itself, without the key."""
    address = str(client.base_url).removesuffix("v1/") + path
    with urllib.request.urlopen(urllib.request.Request(address, method="POST" if post else "GET"), timeout=60) as got:
        text = got.read().decode()
    return json.loads(text) if text else None


def _tokens(client: Any, row: int = 1) -> list[int]:
    found: list[int] = client.completions.create(prompt=PROMPTS[row], **ASK).choices[0].token_ids
    return found


def test_the_server_sleeps_and_wakes_up(client: Any, expected: Callable[[str], list[list[int]]]) -> None:
    _ask(client, "sleep?level=1")
    assert _ask(client, "is_sleeping", post=False) == {"is_sleeping": True}
    _ask(client, "wake_up")
    assert _ask(client, "is_sleeping", post=False) == {"is_sleeping": False}
    assert _tokens(client) == expected("qwen3")[1]


def test_the_server_pauses_and_goes_on(client: Any, expected: Callable[[str], list[list[int]]]) -> None:
    _ask(client, "pause?mode=wait")
    assert _ask(client, "is_paused", post=False) == {"is_paused": True}
    _ask(client, "resume")
    assert _tokens(client) == expected("qwen3")[1]


def test_a_trainers_weights_arrive_over_http_with_their_version(
    client: Any, checkpoint: Callable[[str], Path], tmp_path: Path, expected: Callable[[str], list[list[int]]]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource

    from fl_transfer.weights import SharedMemoryTrainer, SharedMemoryTrainerInfo

    other = variants.other_weights(checkpoint("qwen3"), tmp_path / "other")
    server = HTTPVLLMWeightSyncClient(str(client.base_url).removesuffix("/v1/"))
    for model, tokens in ((other, expected_tokens(other)), (checkpoint("qwen3"), expected("qwen3"))):
        source = ModuleSource(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        SharedMemoryTrainer.trainer_init(SharedMemoryTrainerInfo(rank=0), client=server, source=source).send_weights()
        _ask(client, "reset_prefix_cache")
        assert _tokens(client) == tokens[1]
    server.start_weight_update()
    server.finish_weight_update("seven")
    assert _ask(client, "weight_info", post=False) == {"weight_version": "seven"}


def test_a_profile_is_written(client: Any, profiles: Path) -> None:
    _ask(client, "start_profile")
    _tokens(client)
    _ask(client, "stop_profile")
    assert any(file.stat().st_size for file in profiles.rglob("*") if file.is_file())


def test_vllm_does_not_warn_of_the_threads_on_which_the_model_computes(client: Any, log: Path) -> None:
    assert "OMP_NUM_THREADS=2 is set" not in log.read_text()


def test_the_tokenizer_describes_itself(client: Any) -> None:
    assert _ask(client, "tokenizer_info", post=False)["tokenizer_class"]


def test_who_listens_hears_of_stored_blocks(client: Any, events: Any) -> None:
    _ask(client, "reset_prefix_cache")
    _tokens(client, 2)
    heard = b""
    while b"BlockStored" not in heard:  # the subscriber gives up after a while
        heard = b"".join(events.recv_multipart())


def test_what_the_host_sends_about_its_use_names_nothing_of_ours(
    client: Any, collector: tuple[str, list[dict[str, Any]]], stat_log: Path
) -> None:
    sent = collector[1][0]
    assert sent["model_architecture"] == "Qwen3ForCausalLM"
    assert not sent["gpu_count"]
    assert json.loads((stat_log.parent / "usage_stats.json").read_text().splitlines()[0])["uuid"] == sent["uuid"]
    assert not [text for text in map(str, sent.values()) if "vllm_fl" in text or "fl_dispatch" in text]


@pytest.mark.parametrize("way", ["VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "DO_NOT_TRACK", "the file"])
def test_each_variable_and_the_file_switch_usage_statistics_off(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.usage import usage_lib

    for name in ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "DO_NOT_TRACK"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "do_not_track"
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_ENABLED", None)
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_DO_NOT_TRACK_PATH", str(file))
    assert usage_lib.is_usage_stats_enabled()
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_ENABLED", None)
    if way == "the file":
        file.touch()
    else:
        monkeypatch.setenv(way, "1")
    assert not usage_lib.is_usage_stats_enabled()

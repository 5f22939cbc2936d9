"""Models that look at pictures write Hugging Face's tokens about them, and look at the same one once."""

from __future__ import annotations

import http.server
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import MAX_TOKENS, start_features

import sights

PLUGIN = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin", "VLLM_FL_DENY_VENDORS": "wrong"}
VISITOR = "qwen2_vl"
"""The model that fetches pictures itself."""
each = pytest.mark.parametrize("kind", sights.KINDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sights")
    return {kind: sights.build(kind, folder / kind) for kind in sights.KINDS}


@pytest.fixture(scope="module")
def gallery() -> Iterator[tuple[int, list[str]]]:
    """The port of a server of the first picture, which sends visitors of ``/moved`` there, and who came."""
    visits: list[str] = []
    file = io.BytesIO()
    sights.pictures()[0].save(file, "PNG")

    class Gallery(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            visits.append(self.path)
            moved = self.path == "/moved"
            self.send_response(302 if moved else 200)
            self.send_header("Location", "/picture") if moved else self.send_header("Content-Type", "image/png")
            self.end_headers()
            if not moved:
                self.wfile.write(file.getvalue())

        def log_message(self, *_: Any) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gallery) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, visits
        server.shutdown()


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], gallery: tuple[int, list[str]]) -> dict[str, Any]:
    """Two passes over the same prompts, and one with a wrong attention in the encoder alone."""
    places = (("127.0.0.1", "picture"), ("127.0.0.1", "moved"), ("localhost", "picture"))
    urls = [f"http://{host}:{gallery[0]}/{page}" for host, page in places]
    pictures = [np.asarray(picture).tolist() for picture in sights.pictures()]

    def job(kind: str) -> Any:
        prompt = sights.PROMPTS[kind]
        asked = {"prompt": prompt, "pictures": pictures, "text": sights.WITHOUT, "max_tokens": MAX_TOKENS}
        look = {"do": "look", **asked}
        wrong = {f"paged_attention@{sights.ENCODERS[kind][0]}": ["impl:vendor.wrong"]}
        steps = [look, look, {"do": "policy", "prefer": "reference", "per_op_order": wrong}, {**look, "anew": True}]
        if kind == VISITOR:
            around = {"around": prompt.split(sights.IMAGES[kind]), "template": sights.template(kind)}
            steps.append({"do": "visit", "urls": urls, "max_tokens": MAX_TOKENS, **around})
        engine = {"max_model_len": 256, "max_num_batched_tokens": 256, "allowed_media_domains": ["127.0.0.1"]}
        return models[kind], steps, engine

    started = start_features(*map(job, models), **PLUGIN, VLLM_MEDIA_URL_ALLOW_REDIRECTS="0")
    return dict(zip(models, started.result()["runs"], strict=True))


@each
def test_tokens_equal_hugging_face(kind: str, runs: dict[str, Any], models: dict[str, Path]) -> None:
    expected = sights.expected(models[kind], kind, MAX_TOKENS)
    first, again, *_ = runs[kind]["steps"]
    assert first["tokens"] == again["tokens"] == expected
    assert expected[0] != expected[1]


@each
def test_a_prompt_hits_the_prefix_cache_for_the_same_picture_only(kind: str, runs: dict[str, Any]) -> None:
    first, again = (step["cached"] for step in runs[kind]["steps"][:2])
    assert first[:2] == [0, 0]
    assert min(again[:2]) > 0


@each
def test_the_encoder_and_the_decoder_attend_by_our_operator(kind: str, runs: dict[str, Any]) -> None:
    report = runs[kind]["report"]
    assert report["layers"]["MMEncoderAttention"] == sights.ENCODERS[kind][1]
    assert report["native_layers"] == {}
    assert {"rms_norm", "paged_attention"} <= {key.split(" ")[0] for key in report["counts"]}
    assert report["failed"] == {}


@each
def test_a_wrong_attention_in_the_encoder_changes_what_is_written_about_pictures_only(
    kind: str, runs: dict[str, Any]
) -> None:
    first, _, _, wrong, *_ = runs[kind]["steps"]
    assert wrong["tokens"][2] == first["tokens"][2]
    assert wrong["tokens"][0] != first["tokens"][0]
    assert wrong["tokens"][1] != first["tokens"][1]


def test_pictures_come_from_the_hosts_that_are_allowed_and_from_nowhere_else(
    runs: dict[str, Any], gallery: tuple[int, list[str]]
) -> None:
    *_, wrong, (fetched, moved, other) = runs[VISITOR]["steps"]
    assert fetched == wrong["tokens"][0]
    assert "cannot identify image file" in moved
    assert "The URL must be from one of the allowed domains" in other
    assert gallery[1] == ["/picture", "/moved"]

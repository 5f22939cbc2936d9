"""Models that look at pictures write Hugging Face's tokens about them, and look at the same one once."""

from __future__ import annotations

import http.server
import io
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import MAX_TOKENS, RUNNERS, start_features

import vision
from sampling import drawn

PLUGIN = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin", "VLLM_FL_DENY_VENDORS": "wrong"}
VISITOR = "qwen2_vl"
"""The model that fetches pictures itself."""
ENGINE = {"max_model_len": 256, "max_num_batched_tokens": 256}
TEXT_ALONE = "language model only"
WAYS: Mapping[str, Mapping[str, Any]] = {
    TEXT_ALONE: {"language_model_only": True},
    "V1": {},
    "compiled": {"enforce_eager": False},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "chunks of 32 tokens": {"max_num_batched_tokens": 32},
}
"""Ways to run a model that sees and keeps a state."""
HYBRIDS = drawn(sorted(vision.HYBRID), 1, "hybrids that see")
DRAWN = drawn(tuple((kind, way) for kind in HYBRIDS for way in WAYS), 1, "ways to run a hybrid that sees")
KINDS = [kind for kind in vision.KINDS if kind in HYBRIDS or kind not in vision.HYBRID]
each = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vision")
    return {kind: vision.build(kind, folder / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def gallery() -> Iterator[tuple[int, list[str]]]:
    """The port of a server of the first picture, which sends visitors of ``/moved`` there, and who came."""
    visits: list[str] = []
    file = io.BytesIO()
    vision.pictures()[0].save(file, "PNG")

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


def _look(kind: str, pictures: list[Any]) -> dict[str, Any]:
    """A step of ``run_features`` with one prompt a picture, and one without any."""
    pixels = [np.asarray(picture).tolist() for picture in pictures]
    asked = {"prompt": vision.PROMPTS[kind], "pictures": pixels, "text": vision.WITHOUT}
    return {"do": "look", "max_tokens": MAX_TOKENS, **asked}


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], gallery: tuple[int, list[str]]) -> dict[str, Any]:
    """Two passes over the same prompts, and one with a wrong attention in the encoder alone."""
    places = (("127.0.0.1", "picture"), ("127.0.0.1", "moved"), ("localhost", "picture"))
    urls = [f"http://{host}:{gallery[0]}/{page}" for host, page in places]

    def job(kind: str) -> Any:
        prompt, look = vision.PROMPTS[kind], _look(kind, vision.pictures())
        wrong = {f"paged_attention@{vision.ENCODERS[kind][0]}": ["impl:vendor.wrong"]}
        steps = [look, look, {"do": "policy", "prefer": "reference", "per_op_order": wrong}, {**look, "anew": True}]
        if kind == VISITOR:
            around = {"around": prompt.split(vision.IMAGES[kind]), "template": vision.template(kind)}
            steps.append({"do": "visit", "urls": urls, "max_tokens": MAX_TOKENS, **around})
        return models[kind], steps, {**ENGINE, "allowed_media_domains": ["127.0.0.1"]}

    started = start_features(*map(job, models), **PLUGIN, VLLM_MEDIA_URL_ALLOW_REDIRECTS="0")
    return dict(zip(models, started.result()["runs"], strict=True))


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[list[int]]]:
    return {kind: vision.expected(path, kind, MAX_TOKENS) for kind, path in models.items()}


@each
def test_tokens_equal_hugging_face(kind: str, runs: dict[str, Any], expected: dict[str, list[list[int]]]) -> None:
    first, again, *_ = runs[kind]["steps"]
    assert first["tokens"] == again["tokens"] == expected[kind]
    assert expected[kind][0] != expected[kind][1]


@each
def test_a_prompt_hits_the_prefix_cache_for_the_same_picture_only(kind: str, runs: dict[str, Any]) -> None:
    first, again = (step["cached"] for step in runs[kind]["steps"][:2])
    assert first[:2] == [0, 0]
    assert min(again[:2]) > 0


@each
def test_the_encoder_and_the_decoder_attend_by_our_operator(kind: str, runs: dict[str, Any]) -> None:
    report = runs[kind]["report"]
    assert report["layers"]["MMEncoderAttention"] == vision.ENCODERS[kind][1]
    assert report["native_layers"] == {}
    norm = "gemma_rms_norm" if kind in vision.HYBRID else "rms_norm"
    assert {norm, "paged_attention"} <= {key.split(" ")[0] for key in report["counts"]}
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


@pytest.mark.parametrize(("kind", "way"), DRAWN)
def test_a_hybrid_sees_however_it_runs(
    kind: str, way: str, models: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    look = _look(kind, [] if way == TEXT_ALONE else vision.pictures())
    engine = {**ENGINE, **WAYS[way]}
    (run,) = start_features((models[kind], [look, look], engine), **RUNNERS.get(way, {})).result()["runs"]
    first, again = (step["tokens"] for step in run["steps"])
    assert first == again == expected[kind][-1 if way == TEXT_ALONE else 0 :]
    assert ("MMEncoderAttention" in run["report"]["layers"]) == (way != TEXT_ALONE)
    assert {"gated_delta_rule", "gated_delta_rule_update"} <= {key.split(" ")[0] for key in run["report"]["counts"]}
    assert run["report"]["model_runner"] == ("V1" if way == "V1" else "V2")
    assert run["report"]["native_layers"] == {}

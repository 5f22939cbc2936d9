"""Features of vLLM on a GPU that have no file of their own: sound, pictures, and the compiler's path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import MAX_TOKENS, Runs, environment, ran, start_features

import speech
import vision

pytestmark = pytest.mark.gpu
EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
"""PyTorch convolves float32 in TF32, which has three digits."""
COMMON = {"gpu_memory_utilization": 0.1, "max_num_batched_tokens": 256}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "eager": {**COMMON, "enforce_eager": True},
    "graphs": {**COMMON, "enforce_eager": False},
}
KINDS = ("qwen2_5_vl", "qwen3_5")
"""Attention in each layer, and layers with a state between those."""
each_way = pytest.mark.parametrize("way", WAYS)
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speech.build(tmp_path_factory.mktemp("speech") / "whisper")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("vision")
    return {kind: vision.build(kind, folder / kind) for kind in KINDS}


@pytest.fixture(scope="module", autouse=True)
def engines(whisper: Path, seeing: Mapping[str, Path]) -> Runs:
    """All start at once, in the pool's turns."""
    listen = [
        {"do": "transcribe", "sounds": sounds, "rate": speech.RATE, "max_tokens": MAX_TOKENS}
        for sounds in (speech.sounds(), speech.sounds()[1:])
    ]
    pixels = [np.asarray(picture).tolist() for picture in vision.pictures()]
    look = {"do": "look", "pictures": pixels, "text": vision.WITHOUT, "max_tokens": MAX_TOKENS}
    started = {}
    for way, engine in WAYS.items():
        heard = (whisper, [{"do": "replays"}, *listen, {"do": "replays"}], {**engine, "max_model_len": 128})
        started[f"sound, {way}"] = start_features(heard, **EXACT)
        for kind, checkpoint in seeing.items():
            twice = 2 * [{**look, "prompt": vision.PROMPTS[kind]}]
            seen = (checkpoint, twice, {**engine, "max_model_len": 256})
            started[f"{kind}, {way}"] = start_features(seen, **EXACT)
    return Runs(started)


@each_way
def test_a_transcript_has_hugging_faces_tokens_together_and_alone(way: str, engines: Runs, whisper: Path) -> None:
    (run,) = engines[f"sound, {way}"]["runs"]
    expected = [speech.expected(whisper, sound, MAX_TOKENS) for sound in speech.sounds()]
    _, together, alone, replayed = run["steps"]
    assert together == expected
    assert alone == expected[1:]
    assert {(mode, tokens) for _, mode, tokens in replayed} == (
        {("FULL", 2), ("FULL", 1)} if way == "graphs" else set()
    )


@each_way
def test_a_decoder_attends_to_itself_and_to_the_encoder_through_our_operators(way: str, engines: Runs) -> None:
    (run,) = engines[f"sound, {way}"]["runs"]
    assert sum(run["report"]["attention"].values()) == 4  # two layers, each with both
    assert ran(run, "paged_attention") == ran(run, "kv_cache_write") == {"default.triton"}
    assert run["report"]["native_layers"] == {}
    assert run["report"]["failed"] == {}


@each_way
@each_kind
def test_what_is_written_about_pictures_is_hugging_faces(
    kind: str, way: str, engines: Runs, seeing: Mapping[str, Path]
) -> None:
    (run,) = engines[f"{kind}, {way}"]["runs"]
    expected = vision.expected(seeing[kind], kind, MAX_TOKENS)
    first, again = run["steps"]
    assert first["tokens"] == again["tokens"] == expected
    assert expected[0] != expected[1]
    assert min(again["cached"][:2]) > 0


@each_way
@each_kind
def test_a_model_that_sees_runs_our_operators_behind_its_encoder(kind: str, way: str, engines: Runs) -> None:
    (run,) = engines[f"{kind}, {way}"]["runs"]
    assert ran(run, "paged_attention") == {"default.triton"}
    assert run["report"]["native_layers"] == {}
    assert run["report"]["failed"] == {}


PROGRAM = """
import torch
from fl_dispatch import call_op

x = torch.randn(4, 64, device="cuda")
gate, up = x.chunk(2, -1)
expected = torch.nn.functional.silu(gate) * up
torch.testing.assert_close(call_op("silu_and_mul", x), expected)
torch.testing.assert_close(torch.compile(lambda g, u: torch.nn.functional.silu(g) * u)(gate, up), expected)
"""


def test_kernels_of_ours_and_of_inductor_are_assembled_by_the_ptxas_that_a_variable_names(tmp_path: Path) -> None:
    """The page's check of torch.compile, with its advice for a toolkit of one's own."""
    from triton import knobs

    used, own = tmp_path / "used", tmp_path / "ptxas"
    own.write_text(f'#!/bin/sh\necho "$@" >> {used}\nexec {knobs.nvidia.ptxas.path} "$@"\n')
    own.chmod(0o755)
    folders = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    found = {**EXACT, "VLLM_FL_PER_OP": "silu_and_mul=impl:default.triton", "TRITON_PTXAS_PATH": str(own)}
    run = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(run, env=environment(**found, **folders), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assembled = [line for line in used.read_text().splitlines() if ".ptx" in line]
    assert len(assembled) >= 2

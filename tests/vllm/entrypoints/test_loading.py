"""A checkpoint is found and read in each way that the host documents, and gives Hugging Face's tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MAX_TOKENS, PROMPTS, expected_tokens, start_features
from safetensors.torch import load_file

import hub
import variants

HUB_NAME = "nobody/tiny"
OWN_CODE = """
from transformers import Qwen3Config

class OwnConfig(Qwen3Config):
    model_type = "of_nobody"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loading")


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def other(model: Path, folder: Path) -> Path:
    return variants.other_weights(model, folder / "other")


@pytest.fixture(scope="module")
def letters(model: Path, folder: Path) -> Path:
    return variants.with_characters(model, folder / "letters")


@pytest.fixture(scope="module")
def own_code(model: Path, folder: Path) -> Path:
    """A checkpoint whose configuration's class it brings itself."""
    path = Path(shutil.copytree(model, folder / "own"))
    (path / "own.py").write_text(OWN_CODE)
    described = json.loads((path / "config.json").read_text())
    described |= {"model_type": "of_nobody", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (path / "config.json").write_text(json.dumps(described))
    return path


@pytest.fixture(scope="module")
def online(other: Path, letters: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with two revisions of a checkpoint, and what was fetched from it."""
    with hub.served(HUB_NAME, {"main": other, "second": letters}) as served:
        yield served


@pytest.fixture(scope="module")
def runs(model: Path, own_code: Path, folder: Path, online: tuple[str, list[str]]) -> dict[str, Any]:
    pickled = folder / "pickled"
    shutil.copytree(model, pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    empty = Path(shutil.copytree(pickled, folder / "empty"))
    torch.save(load_file(model / variants.WEIGHTS), pickled / "pytorch_model.bin")
    ask = {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}}
    on_disk: dict[str, tuple[Path, Mapping[str, Any]]] = {
        "pickled": (pickled, {}),
        "dummy": (empty, {"load_format": "dummy"}),
        "own code": (own_code, {"trust_remote_code": True}),
    }
    in_hub: dict[str, tuple[Path, Mapping[str, Any]]] = {
        "main": (Path(HUB_NAME), {}),
        "revision": (Path(HUB_NAME), {"revision": "second"}),
        "tokenizer": (model, {"tokenizer": HUB_NAME, "tokenizer_revision": "second", "tokenizer_mode": "hf"}),
    }
    caches = {"HF_HUB_CACHE": str(folder / "hub"), "HF_MODULES_CACHE": str(folder / "modules")}
    hub_variables = {"HF_ENDPOINT": online[0], "HF_HUB_OFFLINE": "0", **caches}
    processes = []
    for engines, cold, variables in ((on_disk, False, caches), (in_hub, True, hub_variables)):
        jobs = [(path, [ask], options) for path, options in engines.values()]
        processes.append((engines, start_features(*jobs, cold=cold, **variables)))
    return {
        name: run["steps"][0]
        for engines, process in processes
        for name, run in zip(engines, process.result()["runs"], strict=True)
    }


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


@pytest.mark.parametrize("name", ["pickled", "revision", "tokenizer", "own code"])
def test_tokens_equal_hugging_face(name: str, runs: dict[str, Any], expected: Callable[[str], list[list[int]]]) -> None:
    assert _tokens(runs[name]) == expected("qwen3")


def test_without_a_revision_the_main_one_is_loaded(runs: dict[str, Any], other: Path) -> None:
    assert _tokens(runs["main"]) == expected_tokens(other)


def test_weights_are_downloaded_once_for_each_revision(runs: dict[str, Any], online: tuple[str, list[str]]) -> None:
    assert runs
    weights = [fetched for fetched in online[1] if fetched.endswith(variants.WEIGHTS)]
    assert sorted(weights) == [f"{revision}/{variants.WEIGHTS}" for revision in ("main", "second")]


def test_weights_may_be_made_up(runs: dict[str, Any], expected: Callable[[str], list[list[int]]]) -> None:
    tokens = _tokens(runs["dummy"])
    assert [len(each) for each in tokens] == [MAX_TOKENS] * len(PROMPTS)
    assert tokens != expected("qwen3")


def test_another_tokenizer_and_its_revision_write_the_text(runs: dict[str, Any], letters: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(letters)
    for output, plain in zip(runs["tokenizer"], runs["pickled"], strict=True):
        (text,), (tokens,) = output["texts"], output["tokens"]
        assert tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd") == text.rstrip("\ufffd")
        assert text != plain["texts"][0]


def test_a_checkpoints_own_code_needs_the_users_word(own_code: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ValueError, match="trust_remote_code"):
        EngineArgs(str(own_code), max_model_len=256).create_engine_config()


def test_an_architecture_that_nobody_has_is_named(model: Path, folder: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    path = Path(shutil.copytree(model, folder / "unknown"))
    described = {**json.loads((path / "config.json").read_text()), "architectures": ["NobodysForCausalLM"]}
    (path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="NobodysForCausalLM"):
        EngineArgs(str(path), max_model_len=256, model_impl="vllm").create_engine_config()

"""Checkpoints that do not quite fit their config.json, and the expected message of hosts for each.

They are variants of the package's small model, a Llama with four layers, so a test can load dozens of them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fl_dispatch.cli import small_model
from host_engines import Programs, Scenario
from quantized_checkpoints import FP8, I8, SCHEMES, TOKEN8, TOKEN_FP8, compressed, whole, write_checkpoint

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MLP = "model.layers.0.mlp"


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Args:
        write: writes the checkpoint into a new folder.
        refused: a pattern of the refusal, or ``None`` if the checkpoint is served.
        warned: a pattern of a warning.
    """

    write: Callable[[Path], object]
    refused: str | None = None
    warned: str | None = None


def _changed(folder: Path, change: Callable[[dict[str, Tensor]], object], scheme: str | None = None) -> None:
    """Write the small model with changed tensors."""
    if scheme is None:
        shutil.copytree(small_model.CHECKPOINT, folder)
    else:
        write_checkpoint(folder, SCHEMES[scheme])
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def _without(*names: str, scheme: str | None = None) -> Callable[[Path], None]:
    return lambda folder: _changed(folder, lambda tensors: [tensors.pop(name) for name in names], scheme)


def _configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _plain_part(scheme: str, part: str, **said: Any) -> Callable[[Path], None]:
    """Return a writer of a quantized checkpoint that leaves part of merged layers plain, in its format's words."""

    def write(folder: Path) -> None:
        whole_model = load_file(small_model.CHECKPOINT / WEIGHTS)

        def leave(tensors: dict[str, Tensor]) -> None:
            for name in [name for name in tensors if f".{part}." in name]:
                del tensors[name]
            tensors.update({name: tensor for name, tensor in whole_model.items() if f".{part}." in name})

        _changed(folder, leave, scheme)
        config = json.loads((folder / "config.json").read_text())
        _configure(folder, quantization_config={**config["quantization_config"], **said})

    return write


def _other_numbers(folder: Path) -> None:
    """Write fp8 weights although the configuration says int8."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{MLP}.down_proj.weight"
        tensors[name] = tensors[name].float().to(FP8)

    _changed(folder, change, "compressed-tensors W8A8 int8")


def _two_groups(folder: Path) -> None:
    """Write two expressions that match ``down_proj``: the first in sorted order counts, and is second in the file."""
    fp8 = compressed("float-quantized", whole("float", "channel"), TOKEN_FP8)
    int8 = compressed("int-quantized", whole("int", "channel"), TOKEN8)
    write_checkpoint(folder, SCHEMES["compressed-tensors W8A8 fp8"])
    made = load_file(folder / WEIGHTS)
    exact = load_file(small_model.CHECKPOINT / WEIGHTS)
    for name, weight in exact.items():
        if name.endswith("down_proj.weight"):
            scale = weight.float().abs().amax(-1, keepdim=True) / 127
            made[name] = (weight.float() / scale).round().to(I8)
            made[name.replace("weight", "weight_scale")] = scale
    save_file(made, folder / WEIGHTS, {"format": "pt"})
    groups = {
        "group_0": {**fp8["config_groups"]["group_0"], "targets": ["re:.*_proj$"], "format": "float-quantized"},
        "group_1": {**int8["config_groups"]["group_0"], "targets": ["re:.*.down_proj$"], "format": "int-quantized"},
    }
    _configure(folder, quantization_config={**fp8, "format": "mixed-precision", "config_groups": groups})


def _with_head(equal: bool) -> Callable[[Path], None]:
    """Return a writer of a model with a tied head by its configuration, and a head in the file."""

    def write(folder: Path) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            embedding = tensors["model.embed_tokens.weight"]
            tensors["lm_head.weight"] = embedding.clone() if equal else torch.flip(embedding, (0,)).contiguous()

        _changed(folder, change)
        _configure(folder, tie_word_embeddings=True)

    return write


def two_sets(folder: Path) -> None:
    """Write a folder with a single file of one run and the index of another."""
    shutil.copytree(small_model.CHECKPOINT, folder)
    later = {name: tensor * 2 for name, tensor in load_file(folder / WEIGHTS).items()}
    part = "model-00001-of-00001.safetensors"
    save_file(later, folder / part, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(later, part)}))


def _extra(folder: Path) -> None:
    _changed(folder, lambda tensors: tensors.update({f"{MLP}.bonus.weight": torch.ones(2)}))


def _other_size(folder: Path) -> None:
    _changed(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(2)}))


CASES: Mapping[str, Case] = {
    "a weight": Case(_without(f"{MLP}.down_proj.weight"), rf"no tensor for 'weight' of the layer '{MLP}.down_proj'"),
    "a norm": Case(_without("model.norm.weight"), "no tensor for 'weight' of the layer 'model.norm'"),
    "an embedding": Case(
        _without("model.embed_tokens.weight"), "no tensor for 'weight' of the layer 'model.embed_tokens'"
    ),
    "a half": Case(
        _without(f"{MLP}.up_proj.weight"),
        rf"only a part of 'weight' of the layer '{MLP}.gate_up_proj' is in .*, by '{MLP}.gate_proj.weight'",
    ),
    "a scale": Case(
        _without(f"{MLP}.down_proj.weight_scale", scheme="compressed-tensors W8A8 int8"),
        rf"no tensor for 'weight_scale' of the layer '{MLP}.down_proj'",
    ),
    "a size": Case(_other_size, r"'model.norm.weight' of .*model\.safetensors \(float32, 2\) cannot be loaded"),
    "numbers": Case(
        _other_numbers,
        rf"'{MLP}.down_proj.weight' of .*model\.safetensors has numbers of float8_e4m3fn, .* as int8",
    ),
    "two groups": Case(_two_groups),
    "gptq": Case(_plain_part("gptq", "gate_proj", dynamic={"-:.*gate": {}}), r"gate"),
    "awq": Case(_plain_part("awq", "gate_proj", modules_to_not_convert=["gate"]), r"gate"),
    "an equal head": Case(_with_head(equal=True)),
    "two sets": Case(two_sets, warned=r"two sets of weights: .*index\.json, .* would load model\.safetensors"),
}
"""Missing or odd part → case. Each host adds ``a tensor`` and ``another head``."""
EXTRA, HEAD = Case(_extra), Case(_with_head(equal=False))
Outcome = Mapping[str, Any]
"""A host's output when it loads a checkpoint: ``refused`` (``None`` if it serves) and ``messages``."""


class UnfittingCheckpoints(Scenario):
    """A host never silently serves a weight that the checkpoint did not fill, and never silently drops a tensor."""

    EXTRA: ClassVar[str]
    """The host's refusal of a tensor that its model lacks."""
    HEAD_WARNED: ClassVar[str | None] = None
    """The host's warning about a head that the configuration does not ask for."""

    def checkpoints(self) -> Mapping[str, Case]:
        return {
            **CASES,
            "a tensor": replace(EXTRA, refused=self.EXTRA),
            "another head": replace(HEAD, warned=self.HEAD_WARNED),
        }

    def cases(self) -> Mapping[str, Sequence[Any]]:
        made = self.checkpoints()
        return {"name": [*made], "warned": [name for name, case in made.items() if case.warned]}

    @pytest.fixture(scope="class")
    def outcomes(self, host: Programs, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
        """Return name → outcome; the host's script loads all checkpoints in one process."""
        folder = tmp_path_factory.mktemp("unfitting")
        folders = write_all(folder, self.checkpoints())
        jobs, result = folder / "jobs.json", folder / "result.json"
        jobs.write_text(json.dumps([str(path) for path in folders.values()]))
        command = [sys.executable, host.folder / "load_models.py", jobs, result]
        ran = subprocess.run(command, env=host.environment(), capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return dict(zip(folders, json.loads(result.read_text()), strict=True))

    def test_a_checkpoint_that_does_not_fit_is_refused_by_layer_and_tensor(
        self, name: str, outcomes: Mapping[str, Outcome]
    ) -> None:
        expected, refused = self.checkpoints()[name].refused, outcomes[name]["refused"]
        if expected is None:
            assert refused is None
        else:
            assert re.search(expected, refused or "served")
            assert re.match("CheckpointError|ValueError", refused)

    def test_what_is_served_in_the_place_of_something_else_is_named(
        self, warned: str, outcomes: Mapping[str, Outcome]
    ) -> None:
        said = str(self.checkpoints()[warned].warned)
        assert any(re.search(said, message) for message in outcomes[warned]["messages"])


def write_all(folder: Path, cases: Mapping[str, Case]) -> dict[str, Path]:
    """Write the checkpoint of each case; return case → its folder."""
    folders = {name: folder / name.replace(" ", "-") for name in cases}
    for name, case in cases.items():
        case.write(folders[name])
    return folders

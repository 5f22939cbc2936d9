"""gpt-oss in its published format, with experts in MXFP4 and the rest unquantized: the tokens of Transformers' network.

:func:`dequantized` lets Transformers dequantize the experts, so that its plain network gives the right tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from architectures import build_architecture
from e2m1 import mxfp4
from host_engines import WRONG, Engine, Host, Pass, Scenario, Served, clean, ran
from running import expected_tokens

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""The ``quantization_config`` of gpt-oss."""
SIZES = {"intermediate_size": 128}
"""Four groups between the two products of an expert, two on each of two ranks."""
LAYERS = 3


def _rewritten(model: Path, folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> Path:
    shutil.copytree(model, folder)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        stored |= change(name, tensor)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def write_checkpoint(folder: Path, spoil: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor) -> Path:
    """Write a small checkpoint of gpt-oss in the published format.

    Sinks are rounded to bfloat16, as published, because SGLang keeps them in bfloat16 for every dtype.

    Args:
        spoil: name → another tensor.
    """
    plain = build_architecture("gpt_oss", folder.with_name(f"{folder.name}-plain"), **SIZES)

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name.endswith(".sinks"):
            tensor = tensor.bfloat16().to(tensor.dtype)
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: spoil(name, tensor)}
        blocks, scales = mxfp4(tensor.float().transpose(1, 2))
        return {part: spoil(part, made) for part, made in ((f"{name}_blocks", blocks), (f"{name}_scales", scales))}

    return announced(_rewritten(plain, folder, change))


def announced(made: Path) -> Path:
    """Declare in a checkpoint that its experts are in MXFP4; return the checkpoint."""
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    return made


def dequantized(checkpoint: Path, folder: Path) -> Path:
    """Write the checkpoint with the experts dequantized by Transformers."""
    stored = load_file(checkpoint / "model.safetensors")

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name.endswith("_scales"):
            return {}
        if not name.endswith("_blocks"):
            return {name: tensor}
        scales = stored[name.replace("_blocks", "_scales")]
        return {name.removesuffix("_blocks"): convert_moe_packed_tensors(tensor, scales, dtype=torch.float32)}

    made = _rewritten(checkpoint, folder, change)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "quantization_config"}))
    return made


def _halved(name: str, stored: Tensor) -> Tensor:
    """Reduce the exponents of one expert's second product by one."""
    if "layers.1." in name and name.endswith("down_proj_scales"):
        stored[2] -= 1
    return stored


def _without_sinks(name: str, stored: Tensor) -> Tensor:
    """Replace one layer's sinks by values without effect on its softmax."""
    return torch.full_like(stored, -1e4) if "layers.1." in name and name.endswith(".sinks") else stored


SPOILED: Mapping[str, Callable[[str, Tensor], Tensor]] = {
    "scales of one expert halved": _halved,
    "sinks of one layer left out": _without_sinks,
}
ONE = "one rank"
ASKED_WRONG = ("weight_only_moe", "paged_attention")


class GptOss(Scenario):
    """Engines with the published format; engines of the same kind start together."""

    KINDS: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Kind → further arguments of the host's engine; :data:`ONE` is among them."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"kind": list(self.KINDS), "operator": ASKED_WRONG, "fault": list(SPOILED)}

    @pytest.fixture(scope="class")
    def models(self, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
        root = tmp_path_factory.mktemp("gpt-oss")
        published = write_checkpoint(root / "published")
        spoiled = {name: write_checkpoint(root / name.replace(" ", "-"), spoil) for name, spoil in SPOILED.items()}
        return {"published": published, "plain": dequantized(published, root / "dequantized"), **spoiled}

    @pytest.fixture(scope="class")
    def served(self, host: Host, models: Mapping[str, Path]) -> Callable[[str], Served]:
        """Return the answers of each kind, those of one kind with wrong operators, and those of spoiled checkpoints."""
        wrong = {ONE: [Pass(orders={operator: WRONG}) for operator in ASKED_WRONG]}
        place: Mapping[str, Any] = {"plugins": ["wrong_plugin"], "deny": "wrong"}
        found = {}
        for kind, options in self.KINDS.items():
            (found[kind],) = host.serve(Engine(models["published"], [Pass(), *wrong.get(kind, ())], options), **place)
        spoiled = (Engine(models[name], [Pass()]) for name in SPOILED)
        found |= zip(SPOILED, host.serve(*spoiled, **place), strict=True)
        return lambda name: found[name].result()

    def test_tokens_equal_those_of_the_dequantized_network(
        self, kind: str, served: Callable[[str], Served], models: Mapping[str, Path]
    ) -> None:
        assert served(kind).answers[0].tokens == expected_tokens(models["plain"])

    def test_every_layer_that_could_run_our_operators_does(self, host: Host, served: Callable[[str], Served]) -> None:
        for report in served(ONE).reports:
            operators = {*ran(report)}
            assert {"kv_cache_write", "paged_attention", "weight_only_moe"} <= operators
            assert "fused_moe" not in operators
            assert report["layers"].get("Float4Experts") == LAYERS
            assert clean(report, host)

    def test_a_wrong_implementation_changes_the_tokens(self, operator: str, served: Callable[[str], Served]) -> None:
        first, *wrong = served(ONE).answers
        assert wrong[ASKED_WRONG.index(operator)].tokens != first.tokens
        assert served(ONE).counted(operator) > 0

    def test_a_fault_of_the_checkpoint_changes_the_tokens(self, fault: str, served: Callable[[str], Served]) -> None:
        assert served(fault).answers[0].tokens != served(ONE).answers[0].tokens

    def test_the_checkpoint_has_what_the_published_one_has(self, models: Mapping[str, Path]) -> None:
        stored = load_file(models["published"] / "model.safetensors")
        experts = {
            name.rpartition(".")[2]: tuple(one.shape) for name, one in stored.items() if "layers.0.mlp.experts" in name
        }
        assert experts == {
            "gate_up_proj_blocks": (4, 256, 2, 16),
            "gate_up_proj_scales": (4, 256, 2),
            "gate_up_proj_bias": (4, 256),
            "down_proj_blocks": (4, 64, 4, 16),
            "down_proj_scales": (4, 64, 4),
            "down_proj_bias": (4, 64),
        }

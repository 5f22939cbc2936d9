"""Quantized models with latent attention in SGLang: what the dequantized network computes, within its own rounding.

SGLang's engine takes the absorbed form for prompts too, so nothing quantizes the input of ``kv_b_proj``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from torch import nn

import quantized_checkpoints as checkpoints
from fl_dispatch.devices import ASCEND, CPU, CUDA, DeviceSpec
from fl_dispatch.hosting.quantized import schemes
from host_engines import Call, Engine, Host, Pass, Served
from quantized_checkpoints import SCHEMES
from quantized_engines import Run
from quantized_mixture import KimiK2, QuantizedLatent, QuantizedSparse, latent
from sampling import drawn

pytestmark = pytest.mark.engine
BLOCKS = "fp8, blocks of 128"
FINE = (
    "compressed-tensors W4A16",
    "compressed-tensors W4A16, zero points",
    "compressed-tensors W8A16 int8",
    "compressed-tensors W8A16 int8, groups",
    "awq",
)
"""Schemes that leave inputs as they are, so that engine and network are so near that a small mistake shows."""
OTHERS = ("compressed-tensors W8A8 int8", "compressed-tensors W8A8 fp8")
PLAIN_QUERIES = ("gptq", "gptq, 8 bits")
"""Schemes that are served if queries are not compressed."""


NAMES = (
    BLOCKS,
    *drawn(FINE, 1, "latent, fine, SGLang"),
    *drawn((*OTHERS, *PLAIN_QUERIES), 0, "latent, others, SGLang"),
)
RANKS = [Run(name, {"tp_size": 2}, "two ranks") for name in (BLOCKS, "awq")]
NO_TENSORS: dict[str, Any] = {"names": [], "dtypes": [], "shapes": []}
UPDATES: Mapping[str, dict[str, Any]] = {
    "begin_weight_update": {},
    "update_weights_from_tensor": {"named_tensors": []},
    "update_weights_from_distributed": NO_TENSORS,
    "update_weights_from_ipc": {"zmq_handles": {}},
    "update_weights_from_disk": {"model_path": "another"},
}
"""SGLang's ways to new weights, with arguments."""


class TestLatent(QuantizedLatent):
    ABSORBED = True
    ATTENTION = ("mla_decode",)
    PLAIN = PLAIN_QUERIES
    ALONE = [Run(name) for name in NAMES]
    RUNS = [*ALONE, *drawn(RANKS, 1, "latent, ranks, SGLang")]

    def calls(self, run: Run) -> Sequence[Pass | Call]:
        return [Pass(), *(Call(*call) for call in UPDATES.items())] if run in self.ALONE else []

    def test_new_weights_are_refused_in_one_sentence_and_the_old_ones_answer(
        self, alone: Run, served: Callable[[Run], Served]
    ) -> None:
        _, again, *updates, _ = served(alone).answers
        method = alone.scheme.replace(",", "").split()[0]
        said = f"sglang_fl does not support new weights for a model that is quantized by '{method}' yet (model "
        for way, answer in zip(UPDATES, updates, strict=True):
            assert not answer.returned[0], way
            assert answer.returned[1].startswith(said), way
            assert answer.tokens == again.tokens, way


class TestSparse(QuantizedSparse):
    """Keys of the indexer are quantized like the others, because SGLang keeps their product as it is."""

    ABSORBED = True
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    ATTENTION = ("index_key_write", "index_topk", "mla_sparse")
    OF_INDEXER = 2
    ALONE = [Run(name) for name in (BLOCKS, *drawn((*FINE, *OTHERS), 0, "sparse, SGLang"))]
    RUNS = [*ALONE, *drawn(RANKS, 1, "sparse, ranks, SGLang")]


class TestKimiK2(KimiK2):
    ABSORBED = True
    ATTENTION = TestLatent.ATTENTION


JOINED = "latent attention with compressed queries and weights that SGLang's loader cannot join"
GIVEN = "latent attention with scales for inputs in the checkpoint"


def test_weights_that_sglangs_loader_would_join_wrongly_end_the_start(host: Host, tmp_path: Path) -> None:
    written = checkpoints.write_checkpoint(tmp_path / "quantized", SCHEMES["gptq"], model=latent(tmp_path / "whole"))
    (started,) = host.serve(Engine(written, [Pass()]))
    with pytest.raises(AssertionError, match=rf"sglang_fl does not support {JOINED} \(model.layers.0.*\) yet"):
        started.result()


TOKEN, STATIC = (schemes.Numbers(8, "float", per, dynamic=per == "token") for per in ("token", "tensor"))


def eight_bits(per: str, inputs: schemes.Numbers) -> schemes.Scheme:
    return schemes.Scheme("compressed-tensors", schemes.Numbers(8, "float", per), inputs)


@pytest.mark.parametrize(
    ("scheme", "joined", "split"),
    [
        (schemes.fp8("dynamic", [128, 128]), "", ""),
        (eight_bits("channel", TOKEN), "", ""),
        (eight_bits("channel", STATIC), GIVEN, GIVEN),
        (eight_bits("tensor", TOKEN), JOINED, ""),
        (eight_bits("tensor", STATIC), GIVEN, GIVEN),
        (schemes.awq(4, 32, zero_point=True), "", ""),
        (schemes.Scheme("compressed-tensors", schemes.Numbers(4, "int", "group", 32), form="pack-quantized"), "", ""),
        (schemes.gptq({"bits": 4, "group_size": 32, "desc_act": False, "sym": True}), JOINED, ""),
    ],
)
def test_kinds_of_weights_are_refused_where_they_would_be_wrong(
    scheme: schemes.Scheme, joined: str, split: str
) -> None:
    from sglang_fl.quantization import latent as ours
    from sglang_fl.quantization.layers import KINDS

    kind = schemes.kind_of(scheme)
    assert kind is not None
    names = (ours.JOINED, ours.WEIGHT, "q_b_proj")
    assert [ours.refusal(KINDS[kind](scheme), name) for name in names] == [joined, split, ""]


@pytest.mark.parametrize(
    ("device", "architecture", "refused"),
    [
        (CPU, "DeepseekV3ForCausalLM", []),
        (CUDA, "DeepseekV3ForCausalLM", []),
        (ASCEND, "DeepseekV3ForCausalLM", ["latent attention quantized by 'fp8'"]),
        (CPU, "Glm4MoeLiteForCausalLM", ["latent attention of Glm4MoeLiteForCausalLM quantized by 'fp8'"]),
    ],
)
def test_other_chips_and_loaders_refuse_it(device: DeviceSpec, architecture: str, refused: list[str]) -> None:
    from sglang_fl.platform import refusals

    said = SimpleNamespace(architectures=[architecture], quantization_config={"quant_method": "fp8"})
    runner = SimpleNamespace(use_mla_backend=True, model_config=SimpleNamespace(quantization="fp8", hf_config=said))
    asked = refusals._quantized(runner, device)  # type: ignore[arg-type]
    assert [what for present, what in asked if present] == refused


@pytest.mark.parametrize(("quantized", "left"), [((), None), ((0,), [1]), ((0, 1), [])])
def test_sglang_splits_the_weights_that_are_not_quantized(quantized: tuple[int, ...], left: list[int] | None) -> None:
    """``None``: all of them."""
    from sglang_fl.quantization import latent as ours
    from sglang_fl.quantization.layers import Fp8BlockLayer

    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"kv_b_proj": nn.Identity()}) for _ in range(2)])})
    blocks = Fp8BlockLayer(schemes.fp8("dynamic", [128, 128]))
    for place, layer in enumerate(model["layers"]):
        layer["kv_b_proj"].quant_method = SimpleNamespace(scheme=blocks if place in quantized else None)
    seen: list[Any] = []
    ours.split_plain(lambda model, **given: seen.append(given["weight_names"]), model)
    assert seen == [left if left is None else [f"layers.{place}.kv_b_proj.weight" for place in left]]

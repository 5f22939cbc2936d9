"""Quantized models with latent attention in SGLang: what the dequantized network computes, within its own rounding.

As :mod:`test_sglang_quantized`, with the DeepSeek-V3 of :mod:`quantized_mixture`. SGLang's engine takes the absorbed
form for prompts too, so nothing quantizes the input of ``kv_b_proj``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import STEP, answered, start
from torch import nn

import quantized_checkpoints as checkpoints
import quantized_engines
from fl_dispatch.devices import CPU, CUDA, DeviceSpec
from fl_dispatch.hosting.quantized import schemes
from quantized_checkpoints import SCHEMES
from quantized_engines import Rules, comparisons
from quantized_mixture import LATENT_LAYERS, LATENT_PRODUCTS, latent, operator
from quantized_network import Comparison
from running import PROMPTS, ran
from sampling import drawn

pytestmark = pytest.mark.engine
PLUGINS = {
    "SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method,unwritten_memory",
    "SGLANG_FL_DENY_VENDORS": "wrong",
}
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


class Run(quantized_engines.Run):
    """As the host names its layers."""

    @property
    def layer(self) -> str:
        return {"gptq": "GptqLayer", "gptq, 8 bits": "GptqLayer", "awq": "AwqLayer"}.get(self.scheme, self.made.layer)

    @property
    def plain(self) -> bool:
        return self.scheme in PLAIN_QUERIES


ALONE = [
    Run(name)
    for name in (
        BLOCKS,
        *drawn(FINE, 1, "latent, fine, SGLang"),
        *drawn((*OTHERS, *PLAIN_QUERIES), 0, "latent, others, SGLang"),
    )
]
RANKS = drawn([Run(name, {"tp_size": 2}, "two ranks") for name in (BLOCKS, "awq")], 1, "latent, ranks, SGLang")
RUNS = [*ALONE, *RANKS]
NO_TENSORS: dict[str, Any] = {"names": [], "dtypes": [], "shapes": []}
UPDATES: Mapping[str, dict[str, Any]] = {
    "begin_weight_update": {},
    "update_weights_from_tensor": {"named_tensors": []},
    "update_weights_from_distributed": NO_TENSORS,
    "update_weights_from_ipc": {"zmq_handles": {}},
    "update_weights_from_disk": {"model_path": "another"},
}
"""SGLang's ways to new weights, with arguments."""
each_run = pytest.mark.parametrize("run", RUNS, ids=str)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """A DeepSeek-V3; ``plain``: without compressed queries."""
    folder = tmp_path_factory.mktemp("latent")
    return cache(lambda plain: latent(folder / str(plain), **({"q_lora_rank": None} if plain else {})))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, model: Callable[[bool], Path]) -> Callable[[Run], dict[str, Any]]:
    """An engine's right pass; and one with a wrong implementation of the products."""
    folder = tmp_path_factory.mktemp("quantized")

    @cache
    def checkpoint(run: str) -> Path:
        plain = run in PLAIN_QUERIES
        return checkpoints.write_checkpoint(folder / run.replace(" ", "-"), SCHEMES[run], model=model(plain))

    runs = {}
    for run in RUNS:
        order = {run.made.operators[-1]: ["impl:vendor.wrong"]}
        wrong = [{**STEP, "policy": {"prefer": "reference", "per_op_order": order}}] if run in ALONE else []
        asked, again = {**STEP, "scores": True}, [STEP] if run in ALONE else []
        updates = [{**STEP, "call": call} for call in UPDATES.items()] if run in ALONE else []
        steps = (asked, *again, *updates, *wrong)
        runs[run] = start(checkpoint(run.scheme), *steps, variables=PLUGINS, engine=run.engine)
    return lambda run: runs[run].result()


@pytest.fixture(scope="module")
def compared(answers: Callable[[Run], dict[str, Any]], model: Callable[[bool], Path]) -> Callable[[Run], Comparison]:
    def of(run: Run) -> Comparison:
        found = comparisons(lambda one: answered(PROMPTS, answers(one)["steps"][0]), model(run.plain), absorbed=True)
        return found(run)

    return cache(of)


@each_run
class TestNumbers(Rules):
    """They are right."""


@each_run
def test_its_products_and_experts_are_all_ours(run: Run, answers: Callable[[Run], dict[str, Any]]) -> None:
    for report in answers(run)["reports"]:
        assert report["layers"][run.layer] == LATENT_PRODUCTS
        assert report["layers"][run.layer.replace("Layer", "Experts")] == LATENT_LAYERS - 1
        assert report["native_layers"] == report["fallen_through"] == report["undispatched"] == report["failed"] == {}
        found = {"report": report}
        assert all(ran(found, name) - {"vendor.wrong"} for name in (*run.made.operators, operator(run.made)))
        assert ran(found, "mla_decode")
        assert not ran(found, "fused_moe")


@pytest.mark.parametrize("run", ALONE, ids=str)
def test_a_wrong_product_changes_what_it_computes(run: Run, answers: Callable[[Run], dict[str, Any]]) -> None:
    first, *_, wrong = answers(run)["steps"]
    assert wrong["tokens"] != first["tokens"]
    assert answers(run)["report"]["counts"][f"{run.made.operators[-1]} vendor.wrong"] > 0


@pytest.mark.parametrize("run", ALONE, ids=str)
def test_new_weights_are_refused_in_one_sentence_and_the_old_ones_answer(
    run: Run, answers: Callable[[Run], dict[str, Any]]
) -> None:
    _, again, *updates, _ = answers(run)["steps"]
    method = run.scheme.replace(",", "").split()[0]
    said = f"sglang_fl does not support new weights for a model that is quantized by '{method}' yet (model "
    for way, step in zip(UPDATES, updates, strict=True):
        assert not step["answer"][0], way
        assert step["answer"][1].startswith(said), way
        assert step["tokens"] == again["tokens"], way


JOINED = "latent attention with compressed queries and weights that SGLang's loader cannot join"
GIVEN = "latent attention with scales for inputs in the checkpoint"


def test_weights_that_sglangs_loader_would_join_wrongly_end_the_start(
    tmp_path: Path, model: Callable[[bool], Path]
) -> None:
    path = checkpoints.write_checkpoint(tmp_path / "quantized", SCHEMES["gptq"], model=model(False))
    with pytest.raises(AssertionError, match=rf"sglang_fl does not support {JOINED} \(model.layers.0.*\) yet"):
        start(path, STEP).result()


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
        (CUDA, "DeepseekV3ForCausalLM", ["latent attention quantized by 'fp8'"]),
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

"""A KV cache in fp8 under SGLang: it computes what Hugging Face's network does whose keys and values fp8 has rounded.

Prompts are read in chunks, and a second pass finds them in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from serving import STEP, answered, start
from torch import Tensor

from quantized_cache import COMPRESSED, FP8, HOSTS_NAMES, OPERATORS, PLAIN, Cache
from quantized_network import Computed, distance
from running import MAX_TOKENS, PROMPTS, ran
from sampling import drawn

WRONG = tuple(reversed(OPERATORS))
"""A write that writes nothing finds what a wrong attention has led to, and not the right pass's keys and values."""
PLUGINS = {"SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method", "SGLANG_FL_DENY_VENDORS": "wrong"}


@dataclass(frozen=True, eq=False)
class Run:
    """An engine with such a cache; ``engine``: further arguments of ``sglang.Engine``."""

    name: str
    cache: Cache = PLAIN
    engine: Mapping[str, Any] = field(default_factory=lambda: {"kv_cache_dtype": "fp8_e4m3"})

    def __str__(self) -> str:
        return self.name


FLOAT32 = Run("float32")
PAGES = Run("pages of 16", engine={"kv_cache_dtype": "fp8_e4m3", "page_size": 16})
HALF = Run("bfloat16", engine={"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"})
SCALED = Run("scales of a compressed-tensors checkpoint", COMPRESSED, {})
OWN_SCALES = Run("scales of an fp8 checkpoint", FP8)
NAMED = Run("scales with SGLang's names", HOSTS_NAMES, {})
RUNS = [FLOAT32, *drawn((PAGES, HALF, SCALED, OWN_SCALES, NAMED), 1, "a cache in fp8, SGLang")]
EXACT = [run for run in RUNS if run is not HALF]
exact = pytest.mark.parametrize("run", EXACT, ids=str)
each_run = pytest.mark.parametrize("run", RUNS, ids=str)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], dict[str, Any]]:
    """A right pass, one that finds its prompts in the cache; and one for each operator with a wrong implementation."""
    folder, runs = tmp_path_factory.mktemp("cache"), {}
    orders = [{operator: ["impl:vendor.wrong"]} for operator in WRONG]
    wrong = [{**STEP, "policy": {"prefer": "reference", "per_op_order": order}} for order in orders]
    for run in RUNS:
        steps = ({**STEP, "scores": True}, STEP, *(wrong if run is FLOAT32 else ()))
        model = run.cache.checkpoint(folder / run.name.replace(" ", "-"))
        runs[run] = start(model, *steps, variables=PLUGINS, engine=run.engine)
    return lambda run: runs[run].result()


@pytest.fixture(scope="module")
def right(answers: Callable[[Run], Any]) -> Callable[[Run], tuple[Tensor, Computed, list[list[int]]]]:
    """A run's log-probabilities, what the network computes there, and the texts."""

    @cache
    def of(run: Run) -> tuple[Tensor, Computed, list[list[int]]]:
        texts, got = answered(PROMPTS, answers(run)["steps"][0])
        return got, run.cache.computed(texts), texts

    return of


@pytest.mark.engine
@exact
def test_it_computes_what_the_network_with_rounded_keys_and_values_does(run: Run, right: Callable[[Run], Any]) -> None:
    got, there, texts = right(run)
    assert distance(got, there.scores) <= there.rounding
    for other, error in run.cache.distances_of_others(texts, got).items():
        assert error > there.rounding, other


@pytest.mark.engine
@exact
def test_its_tokens_are_the_networks_where_rounding_does_not_decide(run: Run, right: Callable[[Run], Any]) -> None:
    _, there, _ = right(run)
    assert there.decides(PROMPTS, MAX_TOKENS)


@pytest.mark.engine
@pytest.mark.parametrize("run", [run for run in RUNS if run is HALF], ids=str)
def test_in_bfloat16_it_is_as_near_as_hugging_faces_network(run: Run, answers: Callable[[Run], Any]) -> None:
    assert run.cache.is_as_near_in_bfloat16(*answered(PROMPTS, answers(run)["steps"][0]))


@pytest.mark.engine
@each_run
def test_a_prompt_found_in_the_cache_has_the_same_answer(run: Run, answers: Callable[[Run], Any]) -> None:
    first, again = answers(run)["steps"][:2]
    assert first["cached"] == [0] * len(PROMPTS)
    assert max(again["cached"]) >= 320
    if run is not HALF:
        assert again["tokens"] == first["tokens"]


@pytest.mark.engine
@each_run
def test_the_operators_ran_on_a_quantized_cache(run: Run, answers: Callable[[Run], Any]) -> None:
    report = answers(run)["report"]
    assert all(ran(answers(run), operator) - {"vendor.wrong"} for operator in OPERATORS)
    assert report["native_layers"] == report["failed"] == report["undispatched"] == {}


@pytest.mark.engine
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_wrong_implementation_changes_the_tokens(operator: str, answers: Callable[[Run], Any]) -> None:
    first, _, *wrong = answers(FLOAT32)["steps"]
    assert wrong[WRONG.index(operator)]["tokens"] != first["tokens"]
    assert answers(FLOAT32)["report"]["counts"][f"{operator} vendor.wrong"] > 0


# -- without an engine ------------------------------------------------------------------------------------------------


def test_scales_that_a_checkpoint_announces_must_be_loaded(host: None) -> None:
    from sglang_fl.quantization.cache import CacheScales

    def scales(announced: bool, key: float, value: float) -> tuple[float, float]:
        layer = torch.nn.Module()
        method = CacheScales(None, announced, "attn")
        with torch.inference_mode():
            method.create_weights(layer)
            layer.k_scale.fill_(key)
            layer.v_scale.fill_(value)
            method.process_weights_after_loading(layer)
        return layer.k_scale_float, layer.v_scale_float

    assert scales(True, 0.5, 0.25) == scales(False, 0.5, 0.25) == (0.5, 0.25)
    assert scales(False, -1.0, -1.0) == (1.0, 1.0)
    for key, value, name in ((-1.0, 0.5, "k_scale"), (0.5, -1.0, "v_scale")):
        with pytest.raises(ValueError, match=rf"'{name}' was not loaded, which the checkpoint announces \(attn\)"):
            scales(True, key, value)


@pytest.mark.parametrize(
    "name",
    ["k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale", "attn.k_scale"],
)
def test_each_name_of_a_scale_is_that_of_sglangs_parameter(host: None, name: str) -> None:
    from sglang.srt.model_loader.weight_utils import maybe_remap_kv_scale_name

    from sglang_fl.quantization.cache import keep_own_name

    own = "model.layers.0.self_attn.attn.k_scale"
    found = keep_own_name(maybe_remap_kv_scale_name, f"model.layers.0.self_attn.{name}", {own: None})
    assert found == own


def test_sglangs_own_attention_has_no_cache_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_fl.attention import pools

    sizes = {"page_size": 16, "layer_num": 1, "device": "cpu", "enable_memory_saver": False}
    monkeypatch.setattr(pools, "_in_force", pools.DEFAULT)
    monkeypatch.setattr(pools, "_hosts_own", ("torch_native",))
    with pytest.raises(ValueError, match="does not support a KV cache in fp8 for the attention 'torch_native' yet"):
        pools.KVPoolFL(64, dtype=torch.float8_e4m3fn, head_num=2, head_dim=8, **sizes)
    with pytest.raises(ValueError, match="does not support a KV cache in fp8 for the attention 'torch_native' yet"):
        pools.MLAPoolFL(64, dtype=torch.float8_e4m3fn, kv_lora_rank=16, qk_rope_head_dim=8, **sizes)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "a KV cache of type fp8_e5m2 on cpu"),
        ({"kv_cache_dtype": "mxfp8"}, "a KV cache of type mxfp8 on cpu"),
        ({"quantization_param_path": "scales.json"}, "scales of a KV cache in a file of their own on cpu"),
    ],
)
def test_other_caches_are_refused(host: None, asked: dict[str, str], said: str) -> None:
    from sglang.srt.runtime_context import get_server_args

    from fl_dispatch.devices import ASCEND, CPU
    from sglang_fl.platform import refusals

    class Asked:
        """The arguments of the test's SGLang, with others in their place."""

        def __init__(self, **given: str) -> None:
            vars(self).update(given)

        def __getattr__(self, name: str) -> Any:
            return getattr(get_server_args(), name)

    for device, given, sentence in (
        (CPU, asked, said),
        (ASCEND, {"kv_cache_dtype": "fp8_e4m3"}, "a KV cache of type fp8_e4m3 on ascend"),
    ):
        with pytest.raises(ValueError, match=f"sglang_fl does not support {sentence} yet"):
            refusals.refuse_unsupported(Asked(**given), device)
    refusals.refuse_unsupported(Asked(kv_cache_dtype="fp8_e4m3"), CPU)

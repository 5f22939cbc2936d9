"""Mixture of experts: vLLM's modular kernel with our experts and routers; in one process also ``test_families.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Runs, start

from fl_dispatch.settings import get_settings

# ---- several processes


@pytest.fixture(scope="session")
def ranks(checkpoint: Callable[[str], Path]) -> Mapping[str, Any]:
    """Two tensor-parallel ranks over gloo: each expert divided between them, or the experts divided."""
    model, divided = checkpoint("qwen3_moe"), {"enable_expert_parallel": True}
    runs = {
        "tensor": start(model, engine={"tensor_parallel_size": 2}),
        "expert": start(model, engine={"tensor_parallel_size": 2, **divided}),
    }
    return Runs(runs)


@pytest.mark.parametrize("kind", ["tensor", "expert"])
def test_two_ranks_give_the_same_tokens_through_the_same_implementations(
    kind: str, ranks: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert ranks[kind]["steps"][0]["tokens"] == expected("qwen3_moe")
    first, second = ranks[kind]["reports"]
    assert first["pid"] != second["pid"]
    assert first["counts"] == second["counts"]
    assert first["counts"]["fused_moe vendor.cpu.cpp"] > 0
    assert ("Local/global number of experts: 4/8" in ranks[kind]["log"]) == (kind == "expert")


# ---- routers, without an engine


def assert_routes_like(theirs: Any, native: Any, experts: int) -> None:
    """Our router in the place of ``theirs`` gives what vLLM's ``native`` gives, whatever the order of the experts."""
    from fl_dispatch import bind_op
    from vllm_fl.layers import routers

    found = routers.route(theirs)
    assert found is not None
    ours = routers.RouterFL(theirs, found)
    ours.fl_call = bind_op(found.operator)
    assert ours.routing_method_type is theirs.routing_method_type
    generator = torch.Generator().manual_seed(experts)
    hidden, logits = torch.randn(40, 8, generator=generator), torch.randn(40, experts, generator=generator)
    weights, ids = ours.select_experts(hidden, logits, topk_indices_dtype=torch.int64)
    wanted_weights, wanted_ids = native.select_experts(hidden, logits, topk_indices_dtype=torch.int64)
    assert ids.dtype is torch.int64
    order, wanted_order = ids.argsort(), wanted_ids.argsort()
    assert torch.equal(ids.gather(1, order), wanted_ids.gather(1, wanted_order))
    torch.testing.assert_close(weights.gather(1, order), wanted_weights.gather(1, wanted_order))


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_plain_router_gives_what_the_router_of_vllms_cpu_platform_gives(renormalize: bool) -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

    theirs, native = (
        kind(top_k=3, global_num_experts=16, renormalize=renormalize) for kind in (FusedTopKRouter, CPURouter)
    )
    assert_routes_like(theirs, native, 16)


@pytest.mark.parametrize("bias", [None, torch.linspace(-0.3, 0.3, 16)], ids=["no bias", "bias"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_grouped_router_gives_what_vllms_gives(scoring: str, renormalize: bool, bias: torch.Tensor | None) -> None:
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    theirs = GroupedTopKRouter(4, 16, 4, 2, renormalize, scoring, 2.5, bias)
    assert_routes_like(theirs, theirs, 16)


def test_a_biased_router_chooses_by_the_bias_and_scales_the_weights() -> None:
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    bias = torch.linspace(-0.3, 0.3, 16)
    for scoring in ("softmax", "sigmoid"):
        theirs = FusedTopKBiasRouter(4, 16, bias, True, 2.5, scoring_func=scoring)
        assert_routes_like(theirs, GroupedTopKRouter(4, 16, 1, 1, True, scoring, 2.5, bias), 16)


def test_a_models_own_routing_function_stays() -> None:
    from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter

    from vllm_fl.layers import routers

    assert routers.route(CustomRoutingRouter(2, 8, lambda **_: None)) is None
    assert not our_runner(CustomRoutingRouter(2, 8, lambda **_: None)).fl_runs()


def test_every_router_of_vllm_has_an_operator_or_is_known_to_be_python_or_is_refused_by_name() -> None:
    import importlib
    import pkgutil

    import vllm.model_executor.layers.fused_moe.router as theirs

    from vllm_fl.layers import routers

    for module in pkgutil.iter_modules(theirs.__path__, f"{theirs.__name__}."):
        if module.name.endswith("_router"):
            importlib.import_module(module.name)
    kinds, known = routers.BaseRouter.__subclasses__(), {*routers._ROUTES, *routers._PYTHON_ROUTERS, routers.RouterFL}
    assert {kind.__name__ for kind in kinds if kind not in known} == {"CPURouter", "AiterSharedRoutedFusedMoERouter"}
    for kind in set(kinds) - known:
        with pytest.raises(ValueError, match=rf"^routing by vLLM's {kind.__name__}$"):
            routers.route(object.__new__(kind))


def test_a_router_of_another_plugin_stays() -> None:
    from vllm_fl.layers import routers

    parts = {"__module__": "other_plugin", "_compute_routing": None, "routing_method_type": None}
    assert routers.route(object.__new__(type("Theirs", (routers.BaseRouter,), parts))) is None


class Runner:
    """As much of vLLM's runner as ours needs."""

    def __init__(self, layer_name: str, router: Any) -> None:
        self.layer_name, self.router, self._shared_experts = layer_name, router, None


def our_runner(router: Any) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config

    from vllm_fl.layers import mixture

    with set_current_vllm_config(VllmConfig()):
        return type("RunnerFL", (mixture.RunnerLayer, Runner), {})(layer_name="model.layers.7.experts", router=router)


@pytest.mark.parametrize(
    ("router", "arguments", "named"),
    [
        ("fused_topk_bias_router.FusedTopKBiasRouter", {"scoring_func": "sqrtsoftplus"}, "'sqrtsoftplus'"),
        ("fused_topk_bias_router.FusedTopKBiasRouter", {"hash_indices_table": torch.ones(1)}, "token ids"),
        ("fused_topk_bias_router.FusedTopKBiasRouter", {"num_fused_shared_experts": 1}, "shared experts"),
        ("grouped_topk_router.GroupedTopKRouter", {"num_expert_group": 3, "topk_group": 1}, "8 experts in 3 groups"),
        (
            "zero_expert_router.ZeroExpertRouter",
            {"e_score_correction_bias": None, "num_logical_experts": 6, "zero_expert_type": "identity"},
            "experts that compute nothing",
        ),
        ("cpu_router.CPURouter", {}, "routing by vLLM's CPURouter"),
    ],
)
def test_a_routing_without_an_operator_is_refused_by_name(router: str, arguments: dict[str, Any], named: str) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    kind = resolve_obj_by_qualname(f"vllm.model_executor.layers.fused_moe.router.{router}")
    theirs = kind(top_k=2, global_num_experts=8, **arguments)
    with pytest.raises(ValueError, match=rf"vllm_fl does not support .*{named}.* \(model\.layers\.7\.experts\)"):
        our_runner(theirs)


def test_a_router_whose_operator_is_on_the_blacklist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

    from vllm_fl.layers import mixture

    assert our_runner(FusedTopKRouter(2, 8)).fl_runs()
    without = replace(get_settings(), oot_blacklist=frozenset({"topk_softmax"}))
    monkeypatch.setattr(mixture, "get_settings", lambda: without)
    assert our_runner(FusedTopKRouter(2, 8, scoring_func="sigmoid")).fl_runs()
    with pytest.raises(ValueError, match=r"model\.layers\.7\.experts needs 'topk_softmax'"):
        our_runner(FusedTopKRouter(2, 8))


# ---- experts, without an engine


def experts_config(**changes: Any) -> Any:
    """As much of vLLM's configuration of a layer as is looked at."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    activation = MoEActivation(changes.pop("activation", "silu"))
    fields = {
        "is_act_and_mul": activation.is_gated,
        "activation": activation,
        "moe_parallel_config": SimpleNamespace(use_all2all_kernels=False),
        "has_hash_routing": False,
        "routing_method": None,
        "router_logits_dtype": None,
        "hidden_dim": 64,
        "is_lora_enabled": False,
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
    }
    assert set(fields) <= {*FusedMoEConfig.__dataclass_fields__, *dir(FusedMoEConfig)}
    return SimpleNamespace(require_decomposed_backend=False, **{**fields, **changes})  # since 0.33


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"activation": "swigluoai"}, None),
        ({"activation": "relu2_no_mul"}, None),
        ({"activation": "situ"}, "SITU activation"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"swiglu_limit": 7.0}, "experts with a limited or scaled SwiGLU"),
        (
            {"moe_parallel_config": SimpleNamespace(use_all2all_kernels=True, use_ag_rs_all2all_kernels=False)},
            "parallel config",
        ),
    ],
)
def test_experts_that_the_operator_cannot_compute_are_named(changes: dict[str, Any], named: str | None) -> None:
    from vllm_fl.layers import modular_experts as experts

    reason = experts.refusal(experts_config(**changes))
    assert reason is None if named is None else named in str(reason)

"""One sentence refuses what is not covered, and names the line of SGLang's that forbids it, if one does."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from single_layers import asked_of_sglang
from torch import nn

pytest.importorskip("sglang")

from fl_dispatch import SelectionPolicy, policy_context
from fl_dispatch.devices import ASCEND, CPU, CUDA, DeviceSpec, others
from fl_dispatch.settings import Settings
from sglang_fl import environment
from sglang_fl.platform import refusals

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "deterministic": (
        {"enable_deterministic_inference": True, "attention_backend": "triton"},
        "--enable-deterministic-inference",
        "deterministic",
    ),
    "levels": ({"enable_hierarchical_cache": True}, "a cache of several levels", "levels"),
    "offload": ({"cpu_offload_gb": 1}, "weights that are kept elsewhere", "offload"),
    "pdmux": ({"enable_pdmux": True}, "--enable-pdmux", "pdmux"),
    "saver": ({"enable_memory_saver": True}, "--enable-memory-saver", "saver"),
    "compile": ({"enable_torch_compile": True}, "--enable-torch-compile", ""),
    "disaggregation": ({"disaggregation_mode": "prefill"}, "disaggregated prefill and decode", ""),
    "context": ({"dcp_size": 2}, "context parallelism", ""),
    "overlap": ({"enable_single_batch_overlap": True}, "overlapping batches", ""),
}
"""Arguments, the feature, and the name of SGLang's line."""
each = pytest.mark.parametrize("case", REFUSED)


@each
def test_it_is_refused_in_one_sentence(case: str, scheduler: None) -> None:
    given, feature, line = REFUSED[case]
    because = f", because SGLang {re.escape(refusals.BY_HOST[line])}" if line else ""
    with pytest.raises(ValueError, match=rf"^sglang_fl does not support {feature} on cpu yet \(model m\){because}$"):
        refusals.refuse_unsupported(asked_of_sglang(given), CPU)


def test_batch_invariance_is_refused(scheduler: None) -> None:
    with (
        policy_context(SelectionPolicy(batch_invariant=True)),
        pytest.raises(ValueError, match=r"^sglang_fl does not support VLLM_BATCH_INVARIANT=1 on cpu yet"),
    ):
        refusals.refuse_unsupported(asked_of_sglang({}), CPU)


def test_without_any_of_them_nothing_is_refused(scheduler: None) -> None:
    refusals.refuse_unsupported(asked_of_sglang({}), CPU)


def test_adapters_are_refused_on_an_accelerator_that_sglang_has_no_kernels_for(scheduler: None) -> None:
    asked = asked_of_sglang({"enable_lora": True})
    with pytest.raises(ValueError, match=r"^sglang_fl does not support LoRA on ascend yet \(model m\)$"):
        refusals.refuse_unsupported(asked, ASCEND)
    refusals.refuse_unsupported(asked, CUDA)


def test_data_parallel_attention_is_refused_on_an_accelerator(scheduler: None) -> None:
    with pytest.raises(ValueError, match=r"^sglang_fl does not support data-parallel attention on cuda yet"):
        refusals.refuse_unsupported(asked_of_sglang({"enable_dp_attention": True}), CUDA)


STATES = "layers with a state for each request"
PLAIN = {"speculative_algorithm": None, "enable_dp_attention": False, "tp_size": 1}


@pytest.mark.parametrize(
    ("device", "arguments", "config", "said"),
    [
        (CUDA, {}, "Qwen4ExpTextConfig", f"{STATES} of Qwen4ExpTextConfig on cuda"),
        (
            CPU,
            {"speculative_algorithm": "STANDALONE"},
            "Qwen3NextConfig",
            f"a separate draft model and {STATES} ({refusals.SHARED_STATES}) on cpu",
        ),
        (
            CPU,
            {"speculative_algorithm": "NGRAM"},
            "Mamba2Config",
            f"drafts beside {STATES} of Mamba2Config ({refusals.STATES_ONLY}) on cpu",
        ),
        (
            CPU,
            {"speculative_algorithm": "NGRAM"},
            "Qwen3_5MoeTextConfig",
            f"drafts beside {STATES} of Qwen3_5MoeTextConfig on cpu",
        ),
        (CPU, {"enable_dp_attention": True}, "Qwen3NextConfig", f"data-parallel attention beside {STATES} on cpu"),
        (
            CPU,
            {"quantization": "fp8", "tp_size": 2},
            "GraniteMoeHybridConfig",
            f"quantized {STATES} with fewer groups than ranks (MambaMixer2 in layers/attention/mamba/mamba.py) on cpu",
        ),
        (CPU, {}, "Qwen4ExpTextConfig", f"{STATES} of Qwen4ExpTextConfig on cpu"),
        (CPU, {}, "JetNemotronConfig", f"{STATES} of JetNemotronConfig on cpu"),
    ],
)
def test_layers_with_a_state_are_refused_before_weights_load(
    device: DeviceSpec, arguments: dict[str, Any], config: str, said: str, scheduler: None
) -> None:
    with pytest.raises(ValueError, match=f"^sglang_fl does not support {re.escape(said)} yet"):
        refusals.check_model(_runner(config, arguments), device)


def test_quantized_models_with_a_state_are_served_on_a_gpu_and_on_no_chip_like_it(scheduler: None) -> None:
    for config in refusals.STATES:
        for quantization in (None, "fp8"):
            features = refusals._states(_runner(config, {"quantization": quantization}), CUDA)
            asked = [said for asked, said in features if asked]
            assert all("by references of" in said for said in asked)  # this machine has no kernels for a GPU
        features = refusals._states(_runner(config, {"quantization": "fp8"}), others.AMD)
        assert f"quantized {STATES}" in [said for asked, said in features if asked]


def _runner(config: str, arguments: dict[str, Any]) -> Any:
    from sglang.srt import configs

    text = getattr(configs, config)()
    text.architectures = ["A"]
    model = SimpleNamespace(
        quantization=arguments.get("quantization"),
        hf_config=text,
        hf_text_config=text,
        model_path="m",
        head_dim=8,
        is_draft_model=False,
        v_head_dim=8,
        context_len=8,
    )
    return SimpleNamespace(
        model_config=model,
        is_draft_worker="speculative_algorithm" in arguments,
        use_mla_backend=False,
        server_args=SimpleNamespace(**{**PLAIN, **arguments}),
    )


def test_layers_with_a_state_without_a_kernel_are_refused_on_an_accelerator_unless_they_are_sglangs(
    scheduler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"{STATES} by references of causal_conv1d, causal_conv1d_update on cuda yet"
    monkeypatch.setattr(refusals, "hosts_own_attention", tuple)
    with policy_context(SelectionPolicy.from_dict(deny_vendors={"cpu"})):
        with pytest.raises(ValueError, match=f"^sglang_fl does not support {said}"):
            refusals.check_model(_runner("Lfm2Config", {}), CUDA)
        refusals.check_model(_runner("Lfm2Config", {}), CPU)
        monkeypatch.setattr(refusals, "get_settings", lambda: Settings(oot_blacklist=frozenset({"Lfm2ShortConv"})))
        refusals.check_model(_runner("Lfm2Config", {}), CUDA)


def test_sglangs_drafters_use_the_pool_of_the_model_that_they_draft_for(scheduler: None) -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    shared = "Draft worker shares req_to_token_pool with the target worker"
    assert shared in inspect.getsource(KVCacheConfigurator._init_pools)


def test_sglangs_backend_of_models_without_attention_takes_no_state_after_drafts(scheduler: None) -> None:
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as backends
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    assert "attn_backend=mamba_backend" in inspect.getsource(attention_backend_setup.build_attention_backends)
    name = "update_mamba_state_after_mtp_verify"
    assert hasattr(backends.HybridLinearAttnBackend, name)
    assert not hasattr(backends.Mamba2AttnBackend, name)


def test_minimax_is_refused_on_a_cpu_for_sglangs_triton_kernels(scheduler: None) -> None:
    import sglang.srt

    source = Path(sglang.srt.__path__[0], "models/minimax_m2.py").read_text()
    (norm,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "rms_sumsq_serial")
    assert "rmsnorm_sumsq_kernel_serial[" in ast.unparse(norm)
    said = SimpleNamespace(architectures=[refusals.MINIMAX])
    runner: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=said))
    assert refusals._norms(runner, CPU) == [(True, f"{refusals.MINIMAX} ({refusals.MINIMAX_NORMS})")]
    assert not refusals._norms(runner, CUDA)[0][0]


def test_sglang_divides_no_quantized_projection_whose_groups_ranks_share(scheduler: None) -> None:
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

    source = inspect.getsource(MambaMixer2.__init__)
    assert "supported for quantized models only" in source
    assert "if tensor parallel world size divides num groups" in source


def test_in_larger_pages_than_one_token_models_with_states_have_no_prefix_cache(
    scheduler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.arg_groups import overrides
    from sglang.srt.configs import hybrid_arch

    from sglang_fl.platform import model_rules

    declared: list[dict[str, Any]] = []
    monkeypatch.setattr(overrides, "declare_resolution", lambda args, source, **fields: declared.append(fields))
    monkeypatch.setattr(overrides, "model_config_of", lambda args: args.model)
    monkeypatch.setattr(overrides, "resolving_view", lambda args: args)
    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda model: model)
    for pages, model in ((128, "with states"), (128, None), (1, "with states"), (None, "with states")):
        args = SimpleNamespace(attention_backend="a", page_size=pages, disable_radix_cache=False, model=model)
        model_rules.keep_ours(args, lambda args: None)
    assert declared == [{"disable_radix_cache": True}]


def test_cross_attention_is_refused_in_the_first_batch_that_has_it(scheduler: None) -> None:
    from sglang_fl.attention.attention_backend import AttentionFLBackend

    batch: Any = SimpleNamespace(encoder_lens=torch.tensor([3]), forward_mode=None)
    with pytest.raises(NotImplementedError, match="sglang_fl does not support cross attention yet"):
        AttentionFLBackend.init_forward_metadata(AttentionFLBackend.__new__(AttentionFLBackend), batch)


def test_every_line_of_sglangs_has_a_case_and_says_nothing_of_an_accelerator(scheduler: None) -> None:
    assert {line for _, _, line in REFUSED.values() if line} == {*refusals.BY_HOST}
    with pytest.raises(ValueError, match=r"a cache of several levels on ascend yet \(model m\)$"):
        refusals.refuse_unsupported(asked_of_sglang({"enable_hierarchical_cache": True}), ASCEND)


@pytest.mark.parametrize("line", refusals.BY_HOST)
def test_the_function_is_in_the_file(line: str) -> None:
    import sglang.srt

    found = re.search(r"\((\w+) in (\S+\.py)\)", refusals.BY_HOST[line])
    assert found is not None
    source = Path(sglang.srt.__path__[0], found[2]).read_text()
    named = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    assert found[1] in named


@pytest.mark.parametrize(
    ("device", "arguments", "architecture", "said"),
    [
        (ASCEND, {}, "GlmMoeDsaForCausalLMNextN", "sparse latent attention of GlmMoeDsaForCausalLMNextN on ascend"),
        (CPU, {}, "HYV4ForCausalLM", "sparse latent attention of HYV4ForCausalLM on cpu"),
        (
            CPU,
            {"enable_dp_attention": True},
            "DeepseekV32ForCausalLM",
            "data-parallel attention beside sparse latent attention on cpu",
        ),
    ],
)
def test_sparse_latent_attention_is_refused_before_weights_load(
    device: DeviceSpec,
    arguments: dict[str, Any],
    architecture: str,
    said: str,
    scheduler: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "hosts_own_attention", list)
    text = SimpleNamespace(index_topk=20, architectures=[architecture])
    model = SimpleNamespace(hf_config=text, hf_text_config=text)
    runner: Any = SimpleNamespace(model_config=model, server_args=SimpleNamespace(**{**PLAIN, **arguments}))
    asked = [what for present, what in refusals._sparse(runner, device) if present]
    assert [f"{what} on {device.name}" for what in asked] == [said]


def test_drafts_of_several_predictors_are_refused_with_the_hosts_line(scheduler: None) -> None:
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    asserted = "assert num_nextn_layers == 1"
    assert asserted in inspect.getsource(deepseek_weight_loader.DeepseekV2WeightLoaderMixin._initialize_nextn_conf)
    for count, drafts, refused in ((3, True, True), (1, True, False), (3, False, False)):
        said = SimpleNamespace(num_nextn_predict_layers=count, architectures=["DeepseekV3ForCausalLMNextN"])
        runner: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=said), is_draft_worker=drafts)
        asked = [what for present, what in refusals._predictors(runner) if present]
        assert asked == [f"drafts of 3 predictors ({refusals.ONE_PREDICTOR})"] * refused


def test_the_first_layer_of_a_rank_may_not_take_the_list_of_another_rank() -> None:
    from sglang_fl.attention import indexer

    layer: Any = nn.Module()
    layer.use_dsa, layer.indexer = False, None
    with pytest.raises(ValueError, match="a rank with a first layer that takes the list of a layer before it yet"):
        indexer.reserve(nn.ModuleList([layer]), torch.zeros, 1, SimpleNamespace())


@pytest.mark.parametrize("kind", ["dsa", "mla"])
def test_sparse_latent_attention_is_refused_with_the_hosts_file(kind: str) -> None:
    from sglang_fl.attention.pools import POOLS

    with pytest.raises(ValueError, match="does not support sparse latent attention yet: .*dsa_indexer.py"):
        POOLS[kind](index_head_dim=128)


def test_settings_of_vllm_alone_have_no_effect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = Settings.of(native_platform=True, page_out=tmp_path)
    monkeypatch.setattr(environment, "get_settings", lambda: given)
    platform, folder = environment.without_effect(CPU)
    assert platform.endswith("has no effect under SGLang, because it has no such platform")
    assert folder.endswith("has no effect under SGLang, because weights move to a disk under vLLM only")
    monkeypatch.setattr(environment, "get_settings", Settings)
    assert environment.without_effect(CPU) == []

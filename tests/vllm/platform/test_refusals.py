"""A configuration that cannot be served is refused at the start, in one sentence that names the reason.

The configurations are vLLM's own, made from a checkpoint's ``config.json`` as ``vllm serve`` makes them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

import architectures
from fl_dispatch import (
    BackendImplKind,
    ConfigError,
    OpImpl,
    SelectionPolicy,
    get_default_manager,
    policy_context,
)
from fl_dispatch.cli.checkpoints import VOCABULARY, configuration
from fl_dispatch.devices import ASCEND, CPU, DeviceSpec, others
from fl_dispatch.devices.cuda import CUDA
from fl_dispatch.hosting.start import first_choices
from fl_dispatch.ops import OPERATORS
from fl_dispatch.settings import Settings, reset_settings
from vllm_fl import environment
from vllm_fl.compat import model_runner, models, versions
from vllm_fl.platform import config, invariance, model_refusals, refusals, startup

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "jamba": "JambaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "whisper": "WhisperForConditionalGeneration",
    "deepseek_v32": "DeepseekV32ForCausalLM",
}


def _describe(family: str) -> Any:
    """The configuration of a small model."""
    import transformers
    from transformers import OlmoHybridConfig, WhisperConfig

    if family in architectures.ARCHITECTURES:
        kind, shape = architectures.ARCHITECTURES[family]
        return getattr(transformers, kind)(**shape)
    if family == "olmo_hybrid":
        return OlmoHybridConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=VOCABULARY)
    if family == "whisper":
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        return WhisperConfig(vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2, **heads)
    if family == "deepseek_v3":
        predicting = configuration(family)
        predicting.num_nextn_predict_layers = 2
        return predicting
    return configuration(family)


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model family → a folder with its ``config.json``, and no weights."""
    root = tmp_path_factory.mktemp("described")

    @cache
    def of(family: str) -> Path:
        described, folder = _describe(family), root / family
        described.architectures = [ARCHITECTURES[family]]
        described.save_pretrained(folder)
        return folder

    return of


@pytest.fixture
def configure(described: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Arguments of vLLM's engine → its configuration, after our changes; the model is Qwen3 unless another is named.

    vLLM has Transformers read a DeepSeek-V3.2 as a dense DeepSeek-V3 from then on, which is taken back at a test's end.
    """
    from transformers import DeepseekV3Config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {**CONFIG_MAPPING._extra_content})
    monkeypatch.setattr(DeepseekV3Config, "model_type", DeepseekV3Config.model_type)

    def of(family: str = "qwen3", **arguments: Any) -> Any:
        fixed = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True}
        return EngineArgs(str(described(family)), **{**fixed, **arguments}).create_engine_config()

    return of


ADAPTED_EXPERTS = f"LoRA on mixture-of-experts models ({refusals.ADAPTED_EXPERTS})"
COMPILED = {"mode": 3, "backend": "eager"}
SPECULATION = {"num_speculative_tokens": 2}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NEVER_RAN = (ASCEND, *(one for one in vars(others).values() if isinstance(one, DeviceSpec)))
"""Chips that nobody served a model on."""
HOPPER, AMPERE = (
    dataclasses.replace(CUDA, capability=lambda index, found=found: found)  # type: ignore[misc]
    for found in ((9, 0), (8, 0))
)


@pytest.mark.parametrize(
    ("family", "arguments", "named"),
    [
        ("olmo_hybrid", {}, "the layers with a state of OlmoHybridForCausalLM"),
        ("mamba2", {"use_replayssm": True}, "states that are replayed from a buffer (use_replayssm)"),
        ("lfm2", {"enable_lora": True}, "LoRA on models with layers that keep a state"),
        ("qwen3_next", {"enable_lora": True}, ADAPTED_EXPERTS),
        ("qwen3_5", {"enable_lora": True}, "LoRA on models with layers that keep a state"),
        (
            "jamba",
            {"speculative_config": {"method": "ngram", **SPECULATION}},
            "speculation by models with Mamba 1 (vLLM keeps no state a draft: mamba1_state_shape in mamba_utils.py)",
        ),
        (
            "jamba",
            {"hf_overrides": {"quantization_config": FP8}, "dtype": "bfloat16"},
            "models with layers of Mamba 1 quantized by 'fp8' (vLLM's layer has no quantized products)",
        ),
        (
            "deepseek_v32",
            {"kv_transfer_config": {"kv_connector": "P2pConnector", "kv_role": "kv_both"}},
            "KV transfer with sparse latent attention",
        ),
        ("deepseek_v32", {"attention_config": {"indexer_kv_dtype": "nvfp4"}}, "index keys of type nvfp4"),
        ("deepseek_v3", {"hf_overrides": {"index_topk": 64}}, "this model's sparse attention"),
        (
            "deepseek_v32",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode context parallelism of sparse latent attention",
        ),
        (
            "deepseek_v2",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dcp_q_replicate": True},
            "decode context parallelism with a copy of the queries (dcp_q_replicate)",
        ),
        (
            "deepseek_v2",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dcp_comm_backend": "a2a"},
            "decode context parallelism by 'a2a'",
        ),
        ("qwen3", {"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ("qwen3", {"enable_dbo": True, "all2all_backend": "deepep_low_latency"}, "dual-batch overlap"),
        ("qwen3", {"ubatch_size": 2, "all2all_backend": "deepep_low_latency"}, "dual-batch overlap"),
        ("qwen3", {"kv_cache_dtype": "fp8_e5m2"}, "a KV cache of type fp8_e5m2"),
        ("deepseek_v32", {"kv_cache_dtype": "fp8_ds_mla"}, "a KV cache of type fp8_ds_mla"),
        (
            "qwen3",
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
            "a KV cache of type fp8 for some layers only",
        ),
        ("qwen3", {"kv_cache_dtype": "int4_per_token_head"}, "a KV cache of type int4_per_token_head"),
        (
            "deepseek_v2",
            {"kv_cache_dtype": "int8_per_token_head"},
            "a KV cache of type int8_per_token_head for latent attention",
        ),
        (
            "qwen3",
            {"kv_cache_dtype": "int8_per_token_head", "hf_overrides": {"head_dim": 18}},
            "a KV cache of type int8_per_token_head for heads of 18 elements",
        ),
        (
            "qwen3_moe",
            {"all2all_backend": "deepep_v2"},
            "the all-to-all backend deepep_v2 (only allgather_reducescatter)",
        ),
        ("qwen3", {"quantization": "fp8", "dtype": "bfloat16"}, "'fp8' for a checkpoint that is not quantized"),
        ("qwen3_moe", {"enable_lora": True}, ADAPTED_EXPERTS),
        ("deepseek_v32", {"enable_lora": True}, ADAPTED_EXPERTS),
        (
            "qwen3",
            {"speculative_config": {"method": "ngram_gpu", **SPECULATION}},
            "speculative decoding with 'ngram_gpu' (only with ngram, draft_model, eagle, eagle3, mtp)",
        ),
    ],
)
def test_an_unsupported_feature_is_named(
    family: str, arguments: dict[str, Any], named: str, configure: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"vllm_fl does not support {named} on cpu yet (model ")):
        configure(family, **arguments)


@pytest.mark.parametrize(
    ("family", "arguments", "named"),
    [
        ("qwen3", {"data_parallel_size": 2}, "data parallelism (one engine for each rank is the way)"),
        ("qwen3", {"speculative_config": {"method": "ngram", **SPECULATION}}, "speculative decoding"),
        ("lfm2", {}, "models with layers that keep a state"),
    ],
)
def test_a_feature_that_our_kv_connector_does_not_serve_is_named(
    family: str, arguments: dict[str, Any], named: str, configure: Callable[..., Any]
) -> None:
    sentence = f"vllm_fl does not support {named} with P2pConnector on cpu yet (model "
    with pytest.raises(ValueError, match=re.escape(sentence)):
        configure(family, **arguments, kv_transfer_config=_connector("P2pConnector"))


def test_our_kv_connector_is_the_only_one_and_its_options_are_read_before_a_model_loads(
    configure: Callable[..., Any],
) -> None:
    configure(kv_transfer_config=_connector("P2pNcclConnector", send_type="GET"))
    with pytest.raises(ValueError, match="kv_connector_extra_config: proxy_prt: unknown; did you mean 'proxy_port'"):
        configure(kv_transfer_config=_connector("P2pNcclConnector", proxy_prt=1))
    with pytest.raises(ValueError, match="does not support P2pConnector as one of several connectors on cpu yet"):
        configure(kv_transfer_config=_connector("MultiConnector", connectors=[{"kv_connector": "P2pConnector"}]))


@pytest.mark.parametrize("among", [False, True])
def test_a_connector_of_somebody_elses_is_not_ours_whatever_its_name(
    among: bool, configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    from fl_transfer import extension

    elses = ModuleType("somebody_elses")
    elses.P2pConnector = ExampleConnector  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, elses.__name__, elses)
    foreign = {"kv_connector": "P2pConnector", "kv_connector_module_path": elses.__name__}
    ours = {**foreign, "kv_connector_module_path": extension.CONNECTOR_MODULE}
    refused = "P2pConnector as one of several" if among else "nccl_num_channels: NCCL chooses its channels"

    def transfer(one: dict[str, str]) -> Any:
        if among:
            return _connector("MultiConnector", connectors=[{**one, "kv_role": "kv_producer"}])
        return _connector(nccl_num_channels=1, **one)

    configure(kv_transfer_config=transfer(foreign))
    with pytest.raises(ValueError, match=refused):
        configure(kv_transfer_config=transfer(ours))
    with pytest.raises(ValueError, match=refused):
        configure(kv_transfer_config=transfer({"kv_connector": "P2pNcclConnector"}))
    monkeypatch.setattr(
        extension, "_offered", {extension.CONNECTOR}
    )  # as in a vLLM that has its P2pNcclConnector again
    configure(kv_transfer_config=transfer({"kv_connector": "P2pNcclConnector"}))


def _connector(kv_connector: str, kv_connector_module_path: str | None = None, **extra: Any) -> Any:
    from vllm.config import KVTransferConfig

    named = {"kv_connector": kv_connector, "kv_connector_module_path": kv_connector_module_path}
    return KVTransferConfig(**named, kv_role="kv_producer", kv_connector_extra_config=extra)


def test_the_host_itself_refuses_balanced_experts_by_the_platforms_name(configure: Callable[..., Any]) -> None:
    sharded = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    assert configure("qwen3_moe", **sharded).parallel_config.enable_expert_parallel
    only = "Expert parallelism load balancing is only supported on CUDA devices or ROCm devices or XPU devices now."
    with pytest.raises(ValueError, match=re.escape(only)):
        configure("qwen3_moe", **sharded, enable_eplb=True)


def test_the_host_overlaps_batches_by_parts_that_it_imports_for_cuda_like_platforms_alone() -> None:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe import all2all_utils

    assert "Microbatching currently only supports the deepep_low_latency, " in inspect.getsource(VllmConfig)
    (guarded,) = (
        node
        for node in ast.parse(inspect.getsource(all2all_utils)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "current_platform.is_cuda_alike()"
    )
    for name in ("DeepEPHTPrepareAndFinalize", "DeepEPLLPrepareAndFinalize"):
        assert name in ast.unparse(guarded)
        assert not hasattr(all2all_utils, name)


def invariant() -> Any:
    return policy_context(SelectionPolicy(batch_invariant=True))


def refused(why: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(why))


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("deepseek_v3", {}, "(no implementation of mla_decode declares batch_invariant)"),
        ("llama", {"tensor_parallel_size": 2}, "with several ranks"),
        ("llama", {"speculative_config": {"method": "ngram", **SPECULATION}}, "with speculative decoding"),
        ("llama", {"enable_lora": True}, "with LoRA"),
        ("llama", {"kv_cache_dtype": "fp8"}, "with a quantized KV cache"),
        ("llama", {"kv_cache_dtype": "int8_per_token_head"}, "with a quantized KV cache"),
        ("qwen3_next", {}, "with models with layers that keep a state"),
    ],
)
def test_what_is_not_batch_invariant_is_refused_by_name(
    configure: Callable[..., Any], family: str, options: dict[str, Any], why: str
) -> None:
    vllm_config = configure(family, **options)
    with invariant(), refused(f"vllm_fl does not support VLLM_BATCH_INVARIANT=1 {why} on cpu"):
        refusals.refuse_unsupported(vllm_config, CPU)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("qwen2_moe", "with Qwen2MoeForCausalLM (it was shown for Gemma2ForCausalLM, LlamaForCausalLM, "),
        ("gemma3", "with Gemma3ForCausalLM"),
    ],
)
def test_batch_invariance_is_refused_for_models_that_nobody_compared(
    configure: Callable[..., Any], family: str, why: str
) -> None:
    vllm_config = configure(family)
    with invariant(), refused(f"VLLM_BATCH_INVARIANT=1 {why}"):
        refusals.refuse_unsupported(vllm_config, CPU)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_dense_models_and_mixtures_are_served_batch_invariantly(configure: Callable[..., Any], family: str) -> None:
    vllm_config = configure(family)
    with invariant():
        refusals.refuse_unsupported(vllm_config, CPU)


def test_batch_invariance_is_refused_where_layers_are_left_to_vllm(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config = configure()
    monkeypatch.setattr(invariance, "get_settings", lambda: Settings(oot_blacklist=frozenset({"ParallelLMHead"})))
    with invariant(), refused("with layers that are left to vLLM (ParallelLMHead)"):
        refusals.refuse_unsupported(vllm_config, CPU)
    monkeypatch.undo()
    vllm_config.compilation_config.custom_ops.append("-rms_norm")
    with invariant(), refused("left to vLLM (custom_ops=['-rms_norm'])"):
        refusals.refuse_unsupported(vllm_config, CPU)


def test_drafts_of_a_model_are_refused_in_the_v1_runner(
    configure: Callable[..., Any], described: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    draft = {"method": "draft_model", "model": str(described("llama")), **SPECULATION}
    reason = "drafts of a model by the V1 model runner (VLLM_USE_V2_MODEL_RUNNER asks for it)"
    with pytest.raises(ValueError, match=re.escape(f"vllm_fl does not support {reason}")):
        configure("llama", speculative_config=draft)


def test_what_a_draft_is_made_of_is_asked_too(
    configure: Callable[..., Any], described: Callable[[str], Path], tmp_path: Path
) -> None:
    mamba = {"method": "draft_model", "model": str(described("mamba2")), **SPECULATION}
    with pytest.raises(ValueError, match="does not support a draft with layers that keep a state on cpu"):
        configure("llama", speculative_config=mamba)
    quantized = json.loads((described("llama") / "config.json").read_text())
    quantized["quantization_config"] = {"quant_method": "torchao"}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    draft = {"method": "draft_model", "model": str(tmp_path), **SPECULATION}
    with pytest.raises(ValueError, match="does not support quantization 'torchao' yet"):
        configure("llama", speculative_config=draft, dtype="bfloat16")


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_drafts_that_attend_both_ways_are_refused_with_the_line_of_vllms(method: str) -> None:
    from vllm.v1.worker import gpu

    said = refusals._speculation(method)
    assert said.startswith(f"speculative decoding with '{method}' (its drafts attend both ways: use_non_causal in ")
    folder, file = Path(*gpu.__path__), said.removesuffix(")").rpartition("/gpu/")[2]
    assert "use_non_causal=" in (folder / file).read_text()


def test_drafts_for_states_are_refused_in_the_v1_runner(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    reason = "speculative decoding by models with layers that keep a state by the V1 model runner (VLLM_USE_V2_"
    with pytest.raises(ValueError, match=re.escape(f"vllm_fl does not support {reason}")):
        configure("qwen3_5", speculative_config={"method": "ngram", **SPECULATION})


def test_drafts_beside_sparse_latent_attention_are_refused_where_nobody_ran_them(
    configure: Callable[..., Any], described: Callable[[str], Path]
) -> None:
    look_up = configure("deepseek_v32", speculative_config={"method": "ngram", **SPECULATION})
    for device in (CPU, HOPPER):
        assert _asked(model_refusals.sparse_features(look_up, device)) == []
    for device in NEVER_RAN:
        refused = _asked(model_refusals.sparse_features(look_up, device))
        assert refused == ["speculative decoding by sparse latent attention"]
    head = {"method": "eagle3", "model": str(described("llama")), **SPECULATION}
    with pytest.raises(ValueError, match="speculative decoding with 'eagle3' by sparse latent attention on cpu yet"):
        configure("deepseek_v32", speculative_config=head)
    other = {"method": "draft_model", "model": str(described("deepseek_v32")), **SPECULATION}
    with pytest.raises(ValueError, match="a draft that lists another number of tokens than its model on cpu yet"):
        configure("deepseek_v2", speculative_config=other)


def test_drafts_of_several_predictors_run_eagerly_on_a_gpu_and_on_no_other_accelerator(
    configure: Callable[..., Any],
) -> None:
    compiled, eager = (
        configure("deepseek_v3", speculative_config={"method": "mtp", **SPECULATION}, enforce_eager=eager)
        for eager in (False, True)
    )
    assert model_runner.has_several_predictors(eager.speculative_config)
    assert _asked(refusals._draft_features(compiled, CPU)) == _asked(refusals._draft_features(eager, HOPPER)) == []
    captured = configure("deepseek_v3", speculative_config={"method": "mtp", **SPECULATION}, enforce_eager=True)
    captured.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    for vllm_config, device in ((compiled, HOPPER), (captured, HOPPER), *((eager, device) for device in NEVER_RAN)):
        assert _asked(refusals._draft_features(vllm_config, device)) == ["drafts of several predictors"]


def _asked(features: list[tuple[bool, str]]) -> list[str]:
    return [feature for asked, feature in features if asked]


def test_drafts_of_a_model_are_served_on_a_gpu_that_has_the_v2_runner(
    configure: Callable[..., Any], described: Callable[[str], Path]
) -> None:
    draft = {"method": "draft_model", "model": str(described("llama")), **SPECULATION}
    assert _asked(refusals._draft_features(configure("llama", speculative_config=draft), HOPPER)) == []


@pytest.mark.parametrize(
    ("device", "refused"),
    [
        (HOPPER, []),
        (
            AMPERE,
            ["a KV cache of type fp8 (Triton compiles fp8 from compute capability 8.9 on, and this is 8.0)"],
        ),
        (ASCEND, ["a KV cache of type fp8"]),
    ],
    ids=["Hopper", "Ampere", "Ascend"],
)
def test_a_cache_in_fp8_is_served_where_kernels_for_it_compile(
    device: Any, refused: list[str], configure: Callable[..., Any]
) -> None:
    assert _asked(refusals._cache_features(configure(kv_cache_dtype="fp8"), device)) == refused


def test_a_cache_in_int8_is_served_where_something_but_the_reference_takes_its_scales(
    configure: Callable[..., Any],
) -> None:
    found = refusals._cache_features(configure(kv_cache_dtype="int8_per_token_head"), ASCEND)
    assert _asked(found) == ["a KV cache of type int8_per_token_head"]
    for op in config.ATTENTION_OPERATORS:
        fn, vendor = OPERATORS[op].reference, BackendImplKind.VENDOR
        impl = OpImpl(op, "vendor.nimbus", vendor, fn, "nimbus", available=lambda: True)
        get_default_manager().registry.register_impl(impl)
    assert not _asked(refusals._cache_features(configure(kv_cache_dtype="int8_per_token_head"), ASCEND))


def test_a_model_with_an_encoder_and_a_decoder_runs_eagerly_on_a_gpu_of_the_v2_runner(
    configure: Callable[..., Any],
) -> None:
    from vllm.config import CompilationMode

    whisper = configure("whisper", max_model_len=128)
    whisper.compilation_config.mode = None
    config.apply_defaults(whisper, HOPPER)
    assert whisper.compilation_config.mode == CompilationMode.NONE
    assert _asked(model_refusals.model_features(whisper.model_config, HOPPER)) == []
    for device in (ASCEND, dataclasses.replace(HOPPER, model_runners=("v1",))):
        assert _asked(model_refusals.model_features(whisper.model_config, device)) == ["encoder-decoder models"]


DIVIDED = {
    "tensor_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "hf_overrides": {"num_key_value_heads": 1},
}


def test_what_is_not_served_from_a_divided_cache_is_named(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    divided = configure(**DIVIDED)
    for device in (CPU, HOPPER):
        assert _asked(refusals._context_features(divided, device)) == []
    for device in NEVER_RAN:
        assert _asked(refusals._context_features(divided, device)) == ["decode context parallelism"]
    divided.kv_transfer_config = object()
    assert _asked(refusals._context_features(divided, CPU)) == ["decode context parallelism with KV transfer"]
    for asked, named in (
        ({"kv_cache_dtype": "fp8"}, "of a quantized KV cache"),
        ({"speculative_config": {"method": "ngram", **SPECULATION}}, "with speculative decoding"),
    ):
        with pytest.raises(ValueError, match=f"vllm_fl does not support decode context parallelism {named} on cpu"):
            configure(**DIVIDED, **asked)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="decode context parallelism by the V1 model runner"):
        configure(**DIVIDED)


def test_models_whose_experts_vllms_own_runner_scales_wrongly_are_refused_on_its_own_platform(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(models, "UNBALANCED_IN_FLOAT16", ("DeepseekV3ForCausalLM",))
    model = configure("deepseek_v3", dtype="float16").model_config
    assert _asked(model_refusals.model_features(model, HOPPER)) == []
    monkeypatch.setattr(type(current_platform), "is_out_of_tree", lambda self: False)
    (found,) = _asked(model_refusals.model_features(model, HOPPER))
    assert found.startswith("DeepseekV3ForCausalLM in float16 on vLLM's own platform")
    model.hf_text_config.routed_scaling_factor = 1.0
    assert _asked(model_refusals.model_features(model, HOPPER)) == []


def test_graphs_do_not_leave_the_device_with_an_engine_that_sleeps(configure: Callable[..., Any]) -> None:
    asked = configure(sleep_mode_offload_cudagraph=True)
    (found,) = _asked(refusals._graph_features(asked, HOPPER))
    assert found == "graphs that leave the device while an engine sleeps (sleep_mode_offload_cudagraph)"
    assert _asked(refusals._graph_features(asked, CPU)) == []


def test_adapters_sleep_on_an_accelerator_where_vllm_keeps_what_is_neither_weight_nor_cache(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = configure("llama", enable_lora=True)
    asked.model_config.enable_sleep_mode = True
    for version, refused in (("0.32", []), ("0.33", []), ("0.99", ["LoRA with sleep mode with vLLM 0.99"])):
        monkeypatch.setattr(versions, "host_version", lambda version=version: version)
        assert _asked(refusals._adapter_features(asked, HOPPER)) == refused
        assert _asked(refusals._adapter_features(asked, CPU)) == []


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("qwen3", {}),
        ("whisper", {"max_model_len": 128}),
        ("qwen3", {"enable_lora": True}),
        ("qwen3", {"enable_lora": True, "compilation_config": COMPILED}),
        ("qwen3", {"enable_lora": True, "speculative_config": {"method": "ngram", **SPECULATION}}),
        ("qwen3", {"all2all_backend": "deepep_v2"}),
        ("qwen3", {"speculative_config": {"method": "ngram", **SPECULATION}}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("deepseek_v2", {}),
        ("qwen3_next", {}),
        ("qwen3_5", {"enable_prefix_caching": False}),
        ("mamba", {}),
        ("jamba", {"tensor_parallel_size": 2}),
        ("mamba2", {}),
        ("granitemoehybrid", {"tensor_parallel_size": 2}),
        ("lfm2", {}),
    ],
)
def test_what_is_supported_is_not_refused(
    family: str, arguments: dict[str, Any], configure: Callable[..., Any]
) -> None:
    vllm_config = configure(family, **arguments)
    assert vllm_config.parallel_config.worker_cls == config.CPU_WORKER
    assert set(vllm_config.additional_config[startup.CONFIG_KEY]) == {"settings", "workers_here", "sizes_left"}


def test_flagcx_is_refused_for_compiled_models_on_several_ranks(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vllm_config = configure(tensor_parallel_size=2, compilation_config=COMPILED)
    _set_variable(monkeypatch, "FLAGCX_PATH", str(tmp_path))
    with pytest.raises(ValueError, match="FlagCX in compiled models"):
        refusals.refuse_unsupported(vllm_config, CPU)


def test_a_flagcx_library_that_does_not_load_is_refused_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _set_variable(monkeypatch, "FLAGCX_PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=f"FLAGCX_PATH: {tmp_path}: no libflagcx.so is there; .* or unset FLAGCX_PATH"
    ):
        environment.check(CPU)


def _set_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Set a variable and read the settings again."""
    monkeypatch.setenv(name, value)
    reset_settings()


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """Making a configuration, vLLM sets variables that change the next one; settings are read anew."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    reset_settings()


@pytest.mark.parametrize("names", ["rms_norm", "fused_moe", "MoERunner,silu_and_mul"])
def test_a_list_that_leaves_out_the_experts_is_refused_for_a_model_that_has_some(
    names: str, configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_variable(monkeypatch, "VLLM_FL_OOT_WHITELIST", names)
    configure("qwen3")
    with pytest.raises(ValueError, match="model .* has experts, .* leaves out"):
        configure("qwen3_moe")


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("qwen3_5", "QwenGatedDeltaNetAttention"),
        ("jamba", "MambaMixer"),
        ("granitemoehybrid", "MambaMixer2"),
        ("lfm2", "ShortConv"),
    ],
)
@pytest.mark.parametrize(
    "names", ["rms_norm,fused_moe,topk_softmax", "rms_norm_gated,RMSNormGated,MoERunner,fused_moe"]
)
def test_a_list_that_leaves_out_layers_with_a_state_is_refused_for_a_model_that_has_some(
    names: str, family: str, layer: str, configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_variable(monkeypatch, "VLLM_FL_OOT_WHITELIST", names)
    with pytest.raises(ValueError, match=f"model .* has layers with a state, .* leaves out {layer}"):
        configure(family)


@pytest.mark.parametrize("family", ["qwen3_5", "mamba", "mamba2", "lfm2"])
def test_states_are_refused_on_accelerators_and_on_an_untested_host(
    family: str, configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config = configure(family)
    sentence = f"does not support the layers with a state of {ARCHITECTURES[family]} on"
    with pytest.raises(ValueError, match=f"{sentence} cuda"):
        refusals.refuse_unsupported(vllm_config, CUDA)
    monkeypatch.setattr(versions, "host_version", lambda: "0.99")
    with pytest.raises(ValueError, match=f"{sentence} cpu"):
        refusals.refuse_unsupported(vllm_config, CPU)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "lfm2"])
def test_states_are_served_on_an_accelerator_where_triton_is_and_every_operator_has_a_kernel(
    family: str, configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = configure(family).model_config
    operators = model_refusals.STATE_LAYERS[model_refusals.STATE_MODELS[model.architecture]]
    monkeypatch.setattr(model_refusals, "why_unserved", lambda: "")
    for absent in (None, *operators):
        monkeypatch.setattr(
            model_refusals, "without_kernels", lambda asked, device: [op for op in asked if op == absent]
        )
        assert model_refusals.serves_states(model, CUDA) == (absent is None)
    monkeypatch.setattr(model_refusals, "without_kernels", lambda asked, device: [])
    monkeypatch.setattr(model_refusals, "why_unserved", lambda: "no driver")
    assert not model_refusals.serves_states(model, CUDA)


def test_states_are_served_by_references_on_an_accelerator_that_neither_vllm_nor_triton_knows(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config = configure("qwen3_5")
    monkeypatch.setattr(model_refusals, "why_unserved", lambda: "no driver")
    assert model_refusals.serves_states(vllm_config.model_config, ASCEND)
    assert not _asked(model_refusals.state_features(vllm_config, ASCEND))
    drafts = configure("qwen3_5", speculative_config={"method": "ngram", **SPECULATION})
    (said,) = _asked(model_refusals.state_features(drafts, ASCEND))
    assert said == "speculative decoding by models with layers that keep a state without Triton"
    assert not _asked(model_refusals.state_features(drafts, CPU))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    v1 = _asked(model_refusals.state_features(configure("qwen3_5"), ASCEND))
    assert v1 == ["models with layers that keep a state by the V1 model runner without Triton"]
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    monkeypatch.setattr(first_choices, "why_unserved", lambda: "")
    assert not model_refusals.serves_states(vllm_config.model_config, ASCEND)


def test_a_quantization_is_named_as_the_checkpoint_does(configure: Callable[..., Any]) -> None:
    known = "awq, gptq, compressed-tensors, fp8, mxfp4, auto-round, modelopt, quark"
    with pytest.raises(ValueError, match=rf"'torchao' yet \(only {known}\)"):
        configure(dtype="bfloat16", hf_overrides={"quantization_config": {"quant_method": "torchao"}})
    with pytest.raises(ValueError, match="'quark' with weights that are not quantized, or in several steps,"):
        configure(dtype="bfloat16", hf_overrides={"quantization_config": {"quant_method": "quark"}})
    with pytest.raises(ValueError, match=r"does not support 'modelopt' without 'quant_algo' yet"):
        configure(dtype="bfloat16", hf_overrides={"quantization_config": {"quant_method": "modelopt"}})


def test_a_quantization_on_a_chip_that_does_not_serve_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl import quantization

    spec = dataclasses.replace(CUDA, name="chip", quantized=())
    monkeypatch.setattr(quantization, "detect_device", lambda: spec)
    with pytest.raises(ValueError, match=r"'fp8' on chip yet \(only on ascend, cpu, cuda\)"):
        quantization.verify("fp8")


def test_quantized_experts_are_refused_on_accelerators(configure: Callable[..., Any]) -> None:
    vllm_config = configure("qwen3_moe")
    vllm_config.model_config.quantization = "auto_gptq"
    with pytest.raises(ValueError, match="does not support experts quantized by 'gptq' on cuda yet"):
        refusals.refuse_unsupported(vllm_config, CUDA)


def test_quantized_latent_attention_is_refused_where_nobody_ran_it(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config = configure("deepseek_v2")
    vllm_config.model_config.quantization = "auto_gptq"
    with pytest.raises(ValueError, match="latent attention quantized by 'gptq' on ascend yet"):
        refusals.refuse_unsupported(vllm_config, ASCEND)
    monkeypatch.setattr(model_refusals, "without_graphs", lambda operators: [])  # kernels come first, as on a GPU
    with pytest.raises(ValueError, match="'gptq' for a checkpoint that is not quantized on cuda yet"):
        refusals.refuse_unsupported(vllm_config, CUDA)


def test_quantized_experts_are_served_where_a_kernel_comes_first_for_them(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config = configure("qwen3_moe")
    vllm_config.model_config.quantization = "auto_gptq"
    monkeypatch.setattr(model_refusals, "without_graphs", lambda operators: [])
    with pytest.raises(ValueError, match="'gptq' for a checkpoint that is not quantized on cuda yet"):
        refusals.refuse_unsupported(vllm_config, CUDA)


def test_kernels_of_fp8_are_not_for_a_chip_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_dispatch.devices import ASCEND
    from fl_dispatch.hosting.quantized import layers
    from vllm_fl.quantization import kernels

    floats = (kernels.Fp8Layer, kernels.Fp8BlockLayer, kernels.Fp8WeightLayer)
    assert {kind.is_supported() for kind in (*floats, kernels.Int8Layer, kernels.PackedLayer)} == {(True, None)}
    monkeypatch.setattr(layers, "detect_device", lambda: ASCEND)
    assert {kind.is_supported() for kind in floats} == {(False, "ascend has no float8_e4m3fn")}
    assert {kind.is_supported() for kind in (kernels.Int8Layer, kernels.PackedLayer)} == {(True, None)}


def test_a_quantization_on_an_untested_host_is_named_as_the_checkpoint_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl.compat import versions
    from vllm_fl.platform.out_of_tree import PlatformFL

    monkeypatch.setattr(versions, "host_version", lambda: "0.99")
    with pytest.raises(ValueError, match=r"'gptq' on vLLM 0.99 yet \(only on 0.32, 0.33\)"):
        PlatformFL.verify_quantization("auto_gptq")


def test_a_scheme_of_compressed_tensors_is_named() -> None:
    from vllm_fl.quantization.configs import CompressedTensorsConfigFL

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 4, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    config = CompressedTensorsConfigFL.from_config({"format": "int-quantized", "config_groups": groups, "ignore": []})
    said = "weights of 4 bits (int, groups of 32) for inputs of 4 bits (int, token) in 'int-quantized'"
    with pytest.raises(ValueError, match=re.escape(said)):
        config.get_scheme(torch.nn.Linear(64, 64), "layer")


def test_an_attention_type_is_named() -> None:
    from vllm_fl.attention.dense import AttentionFLImpl

    with pytest.raises(NotImplementedError, match="'encoder'"):
        AttentionFLImpl(4, 16, 0.25, attn_type="encoder")


def test_the_users_additional_config_stays_as_it_is(configure: Callable[..., Any]) -> None:
    mine = {"mine": 1}
    vllm_config = configure(additional_config=mine)
    assert mine == {"mine": 1}
    assert set(vllm_config.additional_config) == {"mine", "fl_dispatch"}


def test_what_a_parent_packed_stays(configure: Callable[..., Any]) -> None:
    theirs = Settings.of(prefer="vendor").to_json()
    vllm_config = configure(additional_config={"fl_dispatch": {"settings": theirs}})
    assert vllm_config.additional_config["fl_dispatch"]["settings"] == theirs


def test_workers_of_all_data_parallel_ranks_here_share_the_machine_and_a_child_knows(
    configure: Callable[..., Any],
) -> None:
    vllm_config = configure(tensor_parallel_size=2, data_parallel_size=3)
    assert config.workers_here(vllm_config) == 6
    vllm_config.parallel_config.data_parallel_size_local = 1  # as vLLM leaves it to a dense model's engine
    assert config.workers_here(vllm_config) == 6
    vllm_config.additional_config = {}
    assert config.workers_here(vllm_config) == 2


@pytest.mark.parametrize(
    "given",
    ["x", {"prefer": "vendor"}, {"policy": "junk"}, {"settings": "{}"}, {"policy": 3}, {"workers_here": 0}],
)
def test_anything_else_under_our_key_is_refused(configure: Callable[..., Any], given: Any) -> None:
    with pytest.raises(ValueError, match="additional_config.fl_dispatch"):
        configure(additional_config={"fl_dispatch": given})


def test_an_attention_class_that_does_not_exist_is_named_with_its_implementation() -> None:
    startup.activate()
    with pytest.raises(ValueError, match=r"'default\.fl' of 'attention_backend' names 'no\.such\.Class'"):
        refusals._check_attention_class("no.such.Class")
    with pytest.raises(ValueError, match="no AttentionBackend"):
        refusals._check_attention_class("builtins.int")


def test_a_cache_size_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert environment.cache_space() == 1 << 29
    for text in ("much", "-1", "inf"):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", text)
        with pytest.raises(ConfigError, match="number of GiB"):
            environment.cache_space()


def test_a_folder_for_weights_has_no_effect_on_an_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert environment.without_effect(ASCEND) == []
    _set_variable(monkeypatch, "VLLM_FL_PAGE_OUT", str(tmp_path))
    (said,) = environment.without_effect(ASCEND)
    assert f"VLLM_FL_PAGE_OUT: has no effect, because products on {ASCEND.name} pack no weights" in said
    assert environment.without_effect(CPU) == []


def test_switching_every_layer_off_is_refused_before_the_model_loads(configure: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="VLLM_FL_OOT_ENABLED=0"):
        configure(compilation_config={"custom_ops": ["none"]})


def _rotation() -> torch.nn.Module:
    from vllm_fl.layers import forwards

    return type("Rope", (forwards.RotaryLayer, torch.nn.Module), {})()  # type: ignore[no-any-return]


def _quantized() -> torch.nn.Module:
    from fl_dispatch.hosting.layers.layer_kernels import KERNEL
    from fl_dispatch.hosting.quantized.layers import Fp8WeightLayer

    layer = torch.nn.Module()
    KERNEL.give(layer, Fp8WeightLayer())
    return layer


each_layer = pytest.mark.parametrize(
    ("make", "operator"), [(_rotation, "rotary_embedding"), (_quantized, "weight_only_linear")], ids=["ours", "kernel"]
)


@each_layer
def test_a_rule_for_one_of_several_layers_that_share_a_module_is_refused(
    make: Callable[[], torch.nn.Module], operator: str
) -> None:
    from vllm_fl.layers import classes

    shared = make()
    alone, both = torch.nn.ModuleDict({"0": shared}), torch.nn.ModuleDict({"0": shared, "1": shared})
    policy = SelectionPolicy.from_dict(per_op_order={f"{operator}@layers.0": ["reference"]})
    with policy_context(policy):
        classes.bind_scopes(torch.nn.ModuleDict({"layers": alone}))
        with pytest.raises(ValueError, match="share one module"):
            classes.bind_scopes(torch.nn.ModuleDict({"layers": both}))


@each_layer
def test_a_layer_of_shared_experts_is_one_layer_although_vllms_runner_has_it_too(
    make: Callable[[], torch.nn.Module], operator: str
) -> None:
    from vllm_fl.layers import classes

    experts, runner = torch.nn.ModuleDict({"down": make()}), torch.nn.Module()
    runner._shared_experts = torch.nn.ModuleDict({"_layer": experts})
    model = torch.nn.ModuleDict({"shared_experts": experts, "experts": runner})
    with policy_context(SelectionPolicy.from_dict(per_op_order={f"{operator}@shared_experts.down": ["reference"]})):
        classes.bind_scopes(model)


def test_an_attention_backend_of_the_users_that_is_not_taken_is_told(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_fl.platform.out_of_tree import PlatformFL

    startup.activate()
    wanted = AttentionSelectorConfig(head_size=32, dtype=torch.float32, kv_cache_dtype=None, block_size=16)
    with caplog.at_level("WARNING"):
        path = PlatformFL.get_attn_backend_cls(AttentionBackendEnum.TRITON_ATTN, wanted)
    assert f"attention backend {path} instead of TRITON_ATTN" in caplog.text

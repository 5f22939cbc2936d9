"""What cannot be served is refused at the start, in one sentence that names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_dispatch import ConfigError, SelectionPolicy, policy_context
from fl_dispatch.device import CPU
from vllm_fl import config, startup


@pytest.fixture
def vllm_config() -> Any:
    """As much of a configuration as is looked at, all of it supported."""
    model = SimpleNamespace(
        model="tiny",
        is_encoder_decoder=False,
        attn_type="decoder",
        is_hybrid=False,
        is_attention_free=False,
        is_moe=False,
        use_mla=False,
        hf_text_config=SimpleNamespace(),
    )
    parallel = SimpleNamespace(
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        enable_dbo=False,
        world_size=1,
        local_world_size=1,
        data_parallel_size_local=1,
        all2all_backend="allgather_reducescatter",
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        lora_config=None,
        additional_config={"mine": 1},
        compilation_config=SimpleNamespace(custom_ops=["all"], mode=None),
    )


@pytest.mark.parametrize(
    ("part", "field", "value", "named"),
    [
        ("model_config", "is_encoder_decoder", True, "encoder-decoder"),
        ("model_config", "is_hybrid", True, "state-space"),
        ("model_config", "hf_text_config", SimpleNamespace(index_topk=2048), "sparse latent attention"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config", "enable_dbo", True, "dual-batch overlap"),
    ],
)
def test_an_unsupported_feature_is_named(vllm_config: Any, part: str, field: str, value: Any, named: str) -> None:
    startup.activate()
    config.refuse_unsupported(vllm_config, CPU)
    setattr(getattr(vllm_config, part), field, value)
    with pytest.raises(ValueError, match=named):
        config.refuse_unsupported(vllm_config, CPU)


def test_what_is_looked_at_exists_in_vllms_configuration(vllm_config: Any) -> None:
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig

    classes = {
        VllmConfig: vllm_config,
        ModelConfig: vllm_config.model_config,
        ParallelConfig: vllm_config.parallel_config,
        CacheConfig: vllm_config.cache_config,
    }
    for theirs, ours in classes.items():
        known = {*theirs.__dataclass_fields__, *dir(theirs)}
        assert set(vars(ours)) <= known, theirs.__name__


def test_another_exchange_of_tokens_is_refused_for_a_model_with_experts(vllm_config: Any) -> None:
    startup.activate()
    vllm_config.parallel_config.all2all_backend = "deepep_v2"
    config.refuse_unsupported(vllm_config, CPU)
    vllm_config.model_config.is_moe = True
    with pytest.raises(ValueError, match=r"all-to-all backend deepep_v2 \(only allgather_reducescatter\)"):
        config.refuse_unsupported(vllm_config, CPU)


def test_lora_and_flagcx_are_refused_for_compiled_models(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CompilationMode

    startup.activate()
    vllm_config.lora_config = object()
    config.refuse_unsupported(vllm_config, CPU)
    vllm_config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    with pytest.raises(ValueError, match="LoRA on compiled models"):
        config.refuse_unsupported(vllm_config, CPU)
    vllm_config.lora_config, vllm_config.parallel_config.world_size = None, 2
    monkeypatch.setattr(config, "get_settings", lambda: SimpleNamespace(flagcx_path="somewhere"))
    with pytest.raises(ValueError, match="FlagCX in compiled models"):
        config.refuse_unsupported(vllm_config, CPU)


def test_a_flagcx_library_that_does_not_load_is_refused_before_the_model_loads(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    startup.activate()
    monkeypatch.setattr(config, "get_settings", lambda: SimpleNamespace(flagcx_path=tmp_path))
    with pytest.raises(
        ConfigError, match=f"FLAGCX_PATH: {tmp_path}: no libflagcx.so is there; .* or unset FLAGCX_PATH"
    ):
        config.refuse_unsupported(vllm_config, CPU)


@pytest.mark.parametrize("method", ["eagle", "draft_model", "ngram_gpu"])
def test_speculation_other_than_ngram_is_named(method: str, vllm_config: Any) -> None:
    startup.activate()
    vllm_config.speculative_config = SimpleNamespace(method="ngram")
    config.refuse_unsupported(vllm_config, CPU)
    vllm_config.speculative_config = SimpleNamespace(method=method)
    with pytest.raises(ValueError, match=f"speculative decoding with '{method}'"):
        config.refuse_unsupported(vllm_config, CPU)


@pytest.mark.parametrize("names", [{"rms_norm"}, {"fused_moe"}, {"MoERunner", "silu_and_mul"}])
def test_a_list_that_leaves_out_the_experts_is_refused_for_a_model_that_has_some(
    names: set[str], vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup.activate()
    vllm_config.model_config.is_moe = True
    config.refuse_unsupported(vllm_config, CPU)
    listed = replace(config.get_settings(), oot_whitelist=frozenset(names))
    monkeypatch.setattr(config, "get_settings", lambda: listed)
    with pytest.raises(ValueError, match="model tiny has experts, .* leaves out"):
        config.refuse_unsupported(vllm_config, CPU)


def test_lora_is_refused_for_a_model_with_experts(vllm_config: Any) -> None:
    startup.activate()
    vllm_config.lora_config = object()
    vllm_config.model_config.is_moe = True
    with pytest.raises(ValueError, match="LoRA on mixture-of-experts models"):
        config.refuse_unsupported(vllm_config, CPU)


def test_a_quantization_is_named() -> None:
    from vllm_fl.platform import PlatformFL

    with pytest.raises(ValueError, match="'awq'"):
        PlatformFL.verify_quantization("awq")


def test_an_attention_type_is_named() -> None:
    from vllm_fl.attention import AttentionFLImpl

    with pytest.raises(NotImplementedError, match="encoder_decoder"):
        AttentionFLImpl(4, 16, 0.25, attn_type="encoder_decoder")


def test_the_users_additional_config_stays_as_it_is(vllm_config: Any) -> None:
    mine = vllm_config.additional_config
    config.pack_settings(vllm_config)
    assert mine == {"mine": 1}
    assert set(vllm_config.additional_config) == {"mine", "fl_dispatch"}
    assert set(vllm_config.additional_config["fl_dispatch"]) == {"settings", "policy", "workers_here"}


def test_what_a_parent_packed_stays(vllm_config: Any) -> None:
    theirs = SelectionPolicy(prefer="vendor").to_json()
    vllm_config.additional_config = {"fl_dispatch": {"policy": theirs}}
    config.pack_settings(vllm_config)
    assert vllm_config.additional_config["fl_dispatch"]["policy"] == theirs


def test_workers_of_all_data_parallel_ranks_here_share_the_machine_and_a_child_knows(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    parallel.world_size, parallel.local_world_size, parallel.data_parallel_size_local = 4, 2, 3
    assert config.workers_here(vllm_config) == 6
    config.pack_settings(vllm_config)
    parallel.local_world_size, parallel.data_parallel_size_local = 2, 1  # as vLLM leaves it to a dense model's engine
    assert config.workers_here(vllm_config) == 6


@pytest.mark.parametrize(
    "given",
    ["x", {"prefer": "vendor"}, {"policy": "junk"}, {"settings": "{}"}, {"policy": 3}, {"workers_here": 0}],
)
def test_anything_else_under_our_key_is_refused(vllm_config: Any, given: Any) -> None:
    vllm_config.additional_config = {"fl_dispatch": given}
    with pytest.raises(ConfigError, match="additional_config.fl_dispatch"):
        config.pack_settings(vllm_config)


def test_an_attention_class_that_does_not_exist_is_named_with_its_implementation() -> None:
    startup.activate()
    with pytest.raises(ValueError, match=r"'default\.fl' of 'attention_backend' names 'no\.such\.Class'"):
        config._check_attention_class("no.such.Class")
    with pytest.raises(ValueError, match="no AttentionBackend"):
        config._check_attention_class("builtins.int")


def test_a_cache_size_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert config.cache_space() == 1 << 29
    for text in ("much", "-1", "inf"):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", text)
        with pytest.raises(ConfigError, match="number of GiB"):
            config.cache_space()


def test_switching_every_layer_off_is_refused_before_the_model_loads(vllm_config: Any) -> None:
    startup.activate()
    vllm_config.compilation_config.custom_ops = ["none"]
    with pytest.raises(ValueError, match="VLLM_FL_OOT_ENABLED=0"):
        config.refuse_unsupported(vllm_config, CPU)


def test_a_rule_for_one_of_several_layers_that_share_a_module_is_refused() -> None:
    from vllm_fl import layers

    policy = SelectionPolicy.from_dict(per_op_order={"rotary_embedding@layers.0.*": ["reference"]})
    with policy_context(policy):
        layers._refuse_partial_rules("rotary_embedding", ["layers.0.attn.rope"])
        with pytest.raises(ValueError, match="share one module"):
            layers._refuse_partial_rules("rotary_embedding", ["layers.0.attn.rope", "layers.1.attn.rope"])


def test_an_attention_backend_of_the_users_that_is_not_taken_is_told(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_fl.platform import PlatformFL

    startup.activate()
    wanted = AttentionSelectorConfig(head_size=32, dtype=torch.float32, kv_cache_dtype=None, block_size=16)
    with caplog.at_level("WARNING"):
        path = PlatformFL.get_attn_backend_cls(AttentionBackendEnum.TRITON_ATTN, wanted)
    assert f"attention backend {path} instead of TRITON_ATTN" in caplog.text

"""What cannot be served is refused at the start, in one sentence that names it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
    )
    parallel = SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1, enable_dbo=False, world_size=1
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        additional_config={"mine": 1},
    )


@pytest.mark.parametrize(
    ("part", "field", "value", "named"),
    [
        ("model_config", "is_encoder_decoder", True, "encoder-decoder"),
        ("model_config", "attn_type", "encoder_only", "encoder-only"),
        ("model_config", "is_hybrid", True, "state-space"),
        ("model_config", "is_moe", True, "mixture-of-experts"),
        ("model_config", "use_mla", True, "MLA"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config", "enable_dbo", True, "dual-batch overlap"),
        ("cache_config", "cache_dtype", "fp8", "fp8"),
    ],
)
def test_an_unsupported_feature_is_named(vllm_config: Any, part: str, field: str, value: Any, named: str) -> None:
    startup.activate()
    config.refuse_unsupported(vllm_config, CPU)
    setattr(getattr(vllm_config, part), field, value)
    with pytest.raises(ValueError, match=named):
        config.refuse_unsupported(vllm_config, CPU)


def test_flagcx_is_refused_for_several_processes(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    startup.activate()
    monkeypatch.setattr(config, "get_settings", lambda: SimpleNamespace(flagcx_path="/opt/flagcx"))
    with caplog.at_level("WARNING", logger="vllm_fl"):
        config.refuse_unsupported(vllm_config, CPU)
    assert "no FlagCX communicator" in caplog.text
    vllm_config.parallel_config.world_size = 2
    with pytest.raises(ValueError, match="FLAGCX_PATH"):
        config.refuse_unsupported(vllm_config, CPU)


def test_a_quantization_is_named() -> None:
    from vllm_fl.platform import PlatformFL

    with pytest.raises(ValueError, match="'awq'"):
        PlatformFL.verify_quantization("awq")


def test_an_attention_type_is_named() -> None:
    from vllm_fl.attention import AttentionFLImpl

    with pytest.raises(NotImplementedError, match="encoder_only"):
        AttentionFLImpl(4, 16, 0.25, attn_type="encoder_only")


def test_the_users_additional_config_stays_as_it_is(vllm_config: Any) -> None:
    mine = vllm_config.additional_config
    config.pack_settings(vllm_config)
    assert mine == {"mine": 1}
    assert set(vllm_config.additional_config) == {"mine", "fl_dispatch"}
    assert set(vllm_config.additional_config["fl_dispatch"]) == {"settings", "policy"}


def test_what_the_user_packed_stays(vllm_config: Any) -> None:
    vllm_config.additional_config = {"fl_dispatch": {"policy": "theirs"}}
    config.pack_settings(vllm_config)
    assert vllm_config.additional_config["fl_dispatch"]["policy"] == "theirs"

"""The facts about SGLang have all that this package relies on, and the installed SGLang has it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import sglang_fl
from fl_dispatch.devices.cpu import sglang_attention
from fl_dispatch.hosting.facts.fact import check
from fl_dispatch.hosting.facts.source import SourceTree
from overridden import assert_listed, overridden
from sglang_fl.host import HOST, hooked
from sglang_fl.version import SMOKE_TESTED_HOSTS, host_version


def test_every_name_of_the_host_that_a_class_of_ours_overrides_is_a_fact_with_the_parameters_that_ours_takes(
    scheduler: None,
) -> None:
    assert assert_listed(HOST.facts(), list(overridden(sglang_fl, "sglang")), host_version()) > 25


def test_the_installed_sglang_has_everything() -> None:
    findings = check(HOST.facts(), SourceTree.installed("sglang", "torch"), host_version())
    assert [str(broken) for broken in findings.broken] == []
    assert not findings.elsewhere


@pytest.mark.parametrize("version", [*SMOKE_TESTED_HOSTS, host_version()])
def test_what_is_hooked_is_what_the_facts_say(version: str, scheduler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_fl import hook_table as compat

    monkeypatch.setattr(compat, "host_version", lambda: version)
    said = {f"{fact.owner}.{name}" for fact in hooked() if fact.concerns(version) for name in fact.plain_names}
    targets = {hook.target for hook in compat.all_hooks.__wrapped__()}
    assert targets == {target.replace(":", ".") for target in said}
    assert ("sglang.srt.layers.dual_gemm.DualGemm._select_mode" in targets) == (version not in SMOKE_TESTED_HOSTS)


def test_a_version_that_nobody_tested_may_have_renamed_what_refused_features_and_contained_damage_need(
    scheduler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_fl import hook_table as compat
    from sglang_fl.speculation.kernel_hooks import HOOKED as SPECULATIVE

    tested = {hook.target for hook in compat.all_hooks.__wrapped__()}
    monkeypatch.setattr(compat, "host_version", lambda: "0.5.99")
    left = tested - {hook.target for hook in compat.all_hooks.__wrapped__()}
    of_states = (compat.DELTA, compat.ELEMENTWISE, compat.OVERRIDES, compat.QWEN_ATTENTION, compat.SCATTER)
    of_latents = (compat.LATENT, compat.LATENT_ATTENTION, compat.POOL_SIZES, compat.PREDICTOR, compat.DRAFT_NORMS)
    of_features = (*of_latents, compat.PROMPT_GRAPHS, compat.UPDATER, compat.PIPELINE, *of_states)
    owners = tuple(owner.replace(":", ".") for owner in of_features)
    of_scheduler = ("init_req_max_new_tokens", "update_running_batch")
    single = (*(f"Scheduler.{name}" for name in of_scheduler), "ModelRunner.check_quantized_moe_compatibility")
    of_damage = (
        "ModelRunner.sample",
        "eagle_utils.eagle_sample",
        *(f"Scheduler.{name}" for name in ("get_next_batch_to_run", "run_batch", "process_batch_result")),
    )
    of_scales = ("weight_utils.maybe_remap_kv_scale_name", "DefaultModelLoader.load_weights_and_postprocess")
    functions = ("model_config.is_deepseek_dsa", "factory.get_rope_cpu")
    single_targets = tuple(f".{name}" for name in (*single, *of_damage, *of_scales, *functions))
    assert left == {target.replace(":", ".") for target, _ in SPECULATIVE} | {
        target for target in tested if target.startswith(owners) or target.endswith(single_targets)
    }


def test_a_model_on_a_cpu_keeps_the_sizes_of_its_checkpoint(scheduler: None) -> None:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor import model_runner
    from sglang.srt.runtime_context import get_server_args

    given = ModelConfig(get_server_args().model_path)
    sizes = given.hf_config.to_dict()
    loaded = model_runner.adjust_config_with_unaligned_cpu_tp(given, LoadConfig(), 3)  # ranks that divide no size
    assert loaded.hf_config.to_dict() == sizes


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "arm64"])
def test_the_attention_that_is_taken_back_is_the_one_that_sglang_sets_on_this_processor(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.arg_groups.platform_hook import handle_cpu_backends
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "platform", SimpleNamespace(machine=lambda: machine))
    args = SimpleNamespace(device="cpu", attention_backend=None, sampling_backend=None)
    handle_cpu_backends(args)
    (_, decided), *_ = args._resolved_overrides
    assert decided == {"attention_backend": sglang_attention(machine)}

"""The rules of settings: one a test. ``docs/guide/settings.md`` names the tests of the variables."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_dispatch import SelectionPolicy, config, get_default_manager, settings
from fl_dispatch.backends import vendor
from fl_dispatch.errors import ConfigError, ConfigFileNotFoundError
from fl_dispatch.ops import OPERATORS
from fl_dispatch.settings import (
    ITEMS,
    Origin,
    Settings,
    TunedRule,
    get_settings,
    install_settings,
    load_config_file,
    load_settings,
    names,
    platforms,
    register_layers,
    reset_settings,
    variable_names,
)

DOCS = Path(__file__).parents[3] / "docs/guide/settings.md"
Write = Callable[[str], str]


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No platform file, unless a test asks for one, and no host whose layers are known."""
    monkeypatch.setattr(names, "_layers", {})
    monkeypatch.setattr(platforms, "detect_platform", lambda: None)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a YAML file and return its path."""

    def file(text: str) -> str:
        path = tmp_path / "user.yaml"
        path.write_text(text)
        return str(path)

    return file


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give the machine a platform file."""

    def use(text: str) -> None:
        folder = tmp_path / "config"
        folder.mkdir()
        (folder / "chip.yaml").write_text(text)
        monkeypatch.setattr(platforms, "CONFIG_DIR", folder)
        monkeypatch.setattr(platforms, "detect_platform", lambda: "chip")

    return use


def load(**environ: str) -> Settings:
    return load_settings(environ)


def refused(pattern: str, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError, match=pattern) as caught:
        load_settings(environ)
    return caught.value


# -- every variable ---------------------------------------------------------------------------------------------------


def test_nothing_set_gives_the_defaults() -> None:
    assert load() == Settings()
    assert {str(load().origin(item.field)) for item in ITEMS} == {"default"}


BOOLEANS = {
    "VLLM_FL_PREFER_ENABLED": "enabled",
    "VLLM_FL_STRICT": "strict",
    "USE_FLAGGEMS": "use_flaggems",
    "VLLM_FL_OOT_ENABLED": "oot_enabled",
    "VLLM_FL_NATIVE_PLATFORM": "native_platform",
    "VLLM_FL_FUSE_ROPE_KVCACHE": "fuse_rope_kvcache",
    "VLLM_FL_FUSE_ONE_TOKEN": "fuse_one_token",
    "VLLM_FL_SEAL_TACTICS": "seal_tactics",
    "VLLM_FL_MXFP4_AS_FP8": "mxfp4_as_fp8",
    "VLLM_FL_DISPATCH_DEBUG": "dispatch_debug",
    "VLLM_BATCH_INVARIANT": "batch_invariant",
}


@pytest.mark.parametrize(("variable", "field"), BOOLEANS.items())
def test_booleans(variable: str, field: str) -> None:
    for text in ("1", "true", "YES", "On"):
        assert load(**{variable: text}).value(field) is True
    for text in ("0", "False", "no", "OFF"):
        assert load(**{variable: text}).value(field) is False
    refused(f"environment variable {variable}: '2' is no boolean", **{variable: "2"})


def test_chip_features(platform: Write) -> None:
    assert load().chip_features is True
    assert load(VLLM_FL_CHIP_FEATURES="off").chip_features is False
    refused("environment variable VLLM_FL_CHIP_FEATURES: '2' is no boolean", VLLM_FL_CHIP_FEATURES="2")
    platform("chip_features: false\n")
    assert load().chip_features is False
    assert load(VLLM_FL_CHIP_FEATURES="1").chip_features is True


def test_aten_replacement(platform: Write) -> None:
    assert load().aten_replacement is None
    assert load(VLLM_FL_ATEN_REPLACEMENT="1").aten_replacement is True
    refused("environment variable VLLM_FL_ATEN_REPLACEMENT: '2' is no boolean", VLLM_FL_ATEN_REPLACEMENT="2")
    platform("aten_replacement: false\n")
    assert load().aten_replacement is False
    assert str(load().origin("aten_replacement")) == "chip.yaml (platform), line 1"
    assert load(VLLM_FL_ATEN_REPLACEMENT="1").aten_replacement is True


def test_aten_blacklist() -> None:
    assert load().aten_blacklist == frozenset()
    listed = "aten::cumsum.out,cumsum,mm.default,*"
    assert load(VLLM_FL_ATEN_BLACKLIST=listed).aten_blacklist == set(listed.split(","))
    refused(r"PyTorch has no operator 'cumsum.outt'; cumsum has .*\bout\b", VLLM_FL_ATEN_BLACKLIST="cumsum.outt")
    for name in ("cumsun", "mm.", "name", "__class__", "_dir"):
        refused(f"PyTorch has no operator '{name}'", VLLM_FL_ATEN_BLACKLIST=name)


@pytest.mark.parametrize("value", ["flagos", "vendor", "reference"])
def test_prefer(value: str) -> None:
    found = load(VLLM_FL_PREFER=value)
    assert found.policy.prefer == value
    assert str(found.origin("prefer")) == "environment variable VLLM_FL_PREFER"


def test_prefer_refuses_another_word() -> None:
    error = refused("Invalid prefer value 'vender'; did you mean vendor?", VLLM_FL_PREFER="vender")
    assert error.source == "environment variable VLLM_FL_PREFER"


def test_per_op() -> None:
    found = load(VLLM_FL_PER_OP="rms_norm=vendor:cuda|impl:default.triton ; silu_and_mul=reference;")
    assert found.policy.per_op_order == (
        ("rms_norm", ("vendor:cuda", "impl:default.triton")),
        ("silu_and_mul", ("reference",)),
    )
    assert str(found.origin("per_op_order.rms_norm")) == "environment variable VLLM_FL_PER_OP"


def test_per_op_takes_a_scope() -> None:
    found = load(VLLM_FL_PER_OP="rms_norm@model.layers.3.*=reference;rms_norm=vendor")
    assert dict(found.policy.per_op_order) == {"rms_norm@model.layers.3.*": ("reference",), "rms_norm": ("vendor",)}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rms_norm", "not of the form op=token"),
        ("rms_norm=", "rms_norm: the order is empty"),
        ("rms_norm=vendor|", "unknown token ''"),
        ("rms_norm=vendro", "rms_norm[0]: unknown token 'vendro'; did you mean vendor?"),
        ("rms_norm=vendor:", "unknown token 'vendor:'"),
        ("rms_norm=impl:", "unknown token 'impl:'"),
        ("rms_norm=a=b", "unknown token 'a=b'"),
        ("rms_norm=Vendor", "unknown token 'Vendor'"),
        ("rms_norm=vendor;rms_norm=flagos", "rms_norm: is there twice"),
        ("rms_norm@=vendor", "not an operator"),
        ("=vendor", "not an operator"),
        ("rms norm=vendor", "not an operator"),
        ("rms_nrom=vendor", "unknown operator 'rms_nrom'; did you mean rms_norm?"),
        ("rms_norm=vendor:cdua", "unknown vendor 'cdua'; did you mean cuda?"),
    ],
)
def test_per_op_refuses(text: str, problem: str) -> None:
    refused(f"environment variable VLLM_FL_PER_OP: .*{re.escape(problem)}", VLLM_FL_PER_OP=text)


def test_op_config(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    path.write_text('{"rms_norm": ["vendor", "flagos"]}')
    assert load(VLLM_FL_OP_CONFIG=str(path)).policy.per_op_order == (("rms_norm", ("vendor", "flagos")),)


def test_op_config_is_below_per_op(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ops.json"
    path.write_text('{"rms_norm": ["vendor"]}')
    found = load(VLLM_FL_OP_CONFIG=str(path), VLLM_FL_PER_OP="silu_and_mul=reference")
    assert found.policy.per_op_order == (("silu_and_mul", ("reference",)),)
    assert f"VLLM_FL_OP_CONFIG ({path}) is ignored" in caplog.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"rms_norm": "vendor"}', "rms_norm: must be a list, not 'vendor'"),
        ('["vendor"]', "must be a mapping"),
        ('{"rms_norm": [1]}', r"rms_norm\[0\]: must be a string, not 1"),
        ('{\n"rms_norm": [}', r"ops.json\), line 2: is not valid JSON"),
        ('{"rms_norm": ["vendor"], "rms_norm": ["flagos"]}', "key twice: 'rms_norm'"),
        ('{"rms_norm": []}', "order is empty"),
        ("[" * 100_000, "cannot be read: maximum recursion"),
        ("1" * 10_000, "cannot be read: Exceeds the limit"),
    ],
)
def test_op_config_refuses(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    path.write_text(text)
    error = refused(problem, VLLM_FL_OP_CONFIG=str(path))
    assert error.source.startswith("environment variable VLLM_FL_OP_CONFIG")


def test_op_config_must_exist() -> None:
    with pytest.raises(ConfigFileNotFoundError, match="/nonexistent/ops.json"):
        load(VLLM_FL_OP_CONFIG="/nonexistent/ops.json")


@pytest.mark.parametrize(
    ("variable", "field"),
    [("VLLM_FL_ALLOW_VENDORS", "allow_vendors"), ("VLLM_FL_DENY_VENDORS", "deny_vendors")],
)
def test_vendor_lists(variable: str, field: str) -> None:
    assert load(**{variable: "cuda, ascend"}).value(field) == {"cuda", "ascend"}
    refused("names nothing", **{variable: ","})
    refused("unknown vendor 'asend'; did you mean ascend?", **{variable: "cuda,asend"})
    refused("unknown vendor 'nvidia'; did you mean cuda?", **{variable: "nvidia"})
    assert load(**{variable: "CUDA"}).value(field) == {"CUDA"}  # vendors are matched in any case


@pytest.mark.parametrize(
    ("variable", "field"),
    [("VLLM_FL_FLAGOS_WHITELIST", "flagos_whitelist"), ("VLLM_FL_FLAGOS_BLACKLIST", "flagos_blacklist")],
)
def test_flagos_lists(variable: str, field: str, caplog: pytest.LogCaptureFixture) -> None:
    assert load(**{variable: "mm,to_copy,zeros,custom_op1, mm.out"}).value(field) == {
        "mm", "to_copy", "zeros", "custom_op1", "mm.out",
    }  # fmt: skip
    assert not caplog.records
    refused("unknown operator 'silu_and_mull'; did you mean silu_and_mul?", **{variable: "silu_and_mull"})


@pytest.mark.parametrize(
    ("variable", "field"),
    [("VLLM_FL_OOT_WHITELIST", "oot_whitelist"), ("VLLM_FL_OOT_BLACKLIST", "oot_blacklist")],
)
def test_oot_lists(variable: str, field: str) -> None:
    assert load(**{variable: "rms_norm,SiluAndMul,fused_moe"}).value(field) == {
        "rms_norm",
        "SiluAndMul",
        "fused_moe",
    }
    refused("'rms_nrom'; did you mean rms_norm?", **{variable: "rms_nrom"})
    refused("'rmsnorm'; did you mean rms_norm?", **{variable: "rmsnorm"})


def test_unused_tensors() -> None:
    assert load(VLLM_FL_UNUSED_TENSORS="*.extra.*, lm_head.weight").unused_tensors == {"*.extra.*", "lm_head.weight"}
    refused("'a b' is no pattern of a name", VLLM_FL_UNUSED_TENSORS="a b")


@pytest.mark.parametrize("level", ["DEBUG", "info", "Warning", "ERROR"])
def test_log_level(level: str) -> None:
    assert load(VLLM_FL_LOG_LEVEL=level).log_level == level.upper()


def test_log_level_of_the_host(caplog: pytest.LogCaptureFixture) -> None:
    assert load(VLLM_LOGGING_LEVEL="error").log_level == "ERROR"
    assert load(VLLM_LOGGING_LEVEL="ERROR", VLLM_FL_LOG_LEVEL="INFO").log_level == "INFO"
    names = {name: load(VLLM_LOGGING_LEVEL=name).log_level for name in logging.getLevelNamesMapping()}
    assert names.pop("NOTSET") == "DEBUG"
    assert {name: getattr(logging, found) for name, found in names.items()} == {
        name: level for name, level in logging.getLevelNamesMapping().items() if level
    }
    assert "ignored" not in caplog.text


def test_log_level_refuses_another_word() -> None:
    refused("Invalid log level value 'DEBG'; did you mean DEBUG?", VLLM_FL_LOG_LEVEL="DEBG")


def test_plugin_modules() -> None:
    assert load(VLLM_FL_PLUGIN_MODULES="a.b, c:register").plugin_modules == ("a.b", "c:register")
    refused(r"'a\.\.b' is not the name of a module", VLLM_FL_PLUGIN_MODULES="a..b")


def test_shadow() -> None:
    found = load(
        VLLM_FL_SHADOW_SHARE="0.01",
        VLLM_FL_SHADOW_OPERATORS="rms_norm, silu_and_mul",
        VLLM_FL_SHADOW_SECOND="vendor:cuda",
        VLLM_FL_SHADOW_ACTION="BAN",
        VLLM_FL_SHADOW_BUDGET="0.05",
    )
    assert (found.shadow_share, found.shadow_budget) == (0.01, 0.05)
    assert found.shadow_operators == {"rms_norm", "silu_and_mul"}
    assert (found.shadow_second, found.shadow_action) == ("vendor:cuda", "ban")


def test_damaged_requests() -> None:
    assert load().damaged_requests == "recompute"
    assert load(VLLM_FL_DAMAGED_REQUESTS="End").damaged_requests == "end"
    refused("Invalid treatment of damaged requests value 'abort'", VLLM_FL_DAMAGED_REQUESTS="abort")


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("VLLM_FL_SHADOW_SHARE", "often", "'often' is no number"),
        ("VLLM_FL_SHADOW_SHARE", "1.5", "must be between 0 and 1, not 1.5"),
        ("VLLM_FL_SHADOW_BUDGET", "nan", "must be between 0 and 1, not nan"),
        ("VLLM_FL_SHADOW_OPERATORS", "rms_nrom", "rms_norm"),
        ("VLLM_FL_SHADOW_SECOND", "torch", "unknown token 'torch'"),
        ("VLLM_FL_SHADOW_ACTION", "bann", "Invalid shadow action value 'bann'; did you mean ban"),
    ],
)
def test_shadow_refuses(variable: str, text: str, problem: str) -> None:
    refused(f"environment variable {variable}.*{problem}", **{variable: text})


def test_steps() -> None:
    assert (load().steps, load().steps_ms) == (None, 30.0)
    found = load(VLLM_FL_STEPS="8", VLLM_FL_STEPS_MS="12.5")
    assert (found.steps, found.steps_ms) == (8, 12.5)
    refused("environment variable VLLM_FL_STEPS: '2.5' is no whole number", VLLM_FL_STEPS="2.5")
    refused("environment variable VLLM_FL_STEPS: must be between 1 and 64, not 0", VLLM_FL_STEPS="0")
    refused("environment variable VLLM_FL_STEPS_MS: must be between 0 and 10000, not -1.0", VLLM_FL_STEPS_MS="-1")


def test_platform() -> None:
    for name in ("cpu", "cuda", "ascend"):
        found = load(VLLM_FL_PLATFORM=name)
        assert found.platform == name
        assert str(found.origin("prefer")).startswith(f"{name}.yaml (platform), line ")


def test_platform_must_have_a_file() -> None:
    refused("unknown platform 'cdua'; did you mean cuda?", VLLM_FL_PLATFORM="cdua")
    refused("unknown platform 'toaster'; valid: amd, ascend, cambricon, cpu, cuda", VLLM_FL_PLATFORM="toaster")


def test_config(write: Write) -> None:
    path = write("prefer: vendor\n")
    found = load(VLLM_FL_CONFIG=path)
    assert (found.policy.prefer, found.config_path) == ("vendor", Path(path))
    assert str(found.origin("prefer")) == f"{path}, line 1"


def test_page_out() -> None:
    assert load().page_out is None
    assert load(VLLM_FL_PAGE_OUT="/var/tmp").page_out == Path("/var/tmp")


def test_flagcx_path() -> None:
    assert load(FLAGCX_PATH="/opt/flagcx").flagcx_path == Path("/opt/flagcx")


def test_oplist_path() -> None:
    assert load(FLAGGEMS_ENABLE_OPLIST_PATH="/data/list.txt").oplist_path == Path("/data/list.txt")
    assert "/tmp/" not in str(Settings().oplist_path)


# -- precedence -------------------------------------------------------------------------------------------------------


def test_environment_beats_platform_file(platform: Callable[[str], None]) -> None:
    platform("prefer: reference\nflagos_blacklist: [mm]\n")
    found = load(VLLM_FL_PREFER="vendor")
    assert (found.policy.prefer, found.policy.flagos_blacklist) == ("vendor", {"mm"})
    assert str(found.origin("flagos_blacklist")) == "chip.yaml (platform), line 2"


def test_environment_replaces_and_does_not_merge(platform: Callable[[str], None]) -> None:
    platform("flagos_blacklist: [mm]\nop_backends: {rms_norm: [vendor]}\n")
    found = load(VLLM_FL_FLAGOS_BLACKLIST="custom_op1", VLLM_FL_PER_OP="silu_and_mul=reference")
    assert found.policy.flagos_blacklist == {"custom_op1"}
    assert found.policy.per_op_order == (("silu_and_mul", ("reference",)),)


def test_a_preference_of_the_environment_beats_what_the_platform_has_tuned(
    platform: Callable[[str], None], write: Write
) -> None:
    tuned = "prefer: flagos\nop_tuned: {silu_and_mul: [{order: [vendor]}], rms_norm: [{order: [vendor]}]}\n"
    platform(tuned + "op_backends: {rotary_embedding: [reference]}\n")
    assert [op for op, _ in load(VLLM_FL_STRICT="1").policy.op_tuned] == ["silu_and_mul", "rms_norm"]
    for preference in ("reference", "flagos"):
        found = load(VLLM_FL_PREFER=preference)
        assert (found.policy.prefer, found.policy.op_tuned) == (preference, ())
        assert str(found.origin("op_tuned.rms_norm")) == "default"
        assert found.policy.per_op_order == (("rotary_embedding", ("reference",)),)
    assert [op for op, _ in load(VLLM_FL_CONFIG=write(tuned)).policy.op_tuned] == ["silu_and_mul", "rms_norm"]


def test_platform_file_beats_the_default(platform: Callable[[str], None]) -> None:
    platform("strict: true\n")
    assert load().policy.strict


def test_a_forced_platform_beats_the_machine(platform: Callable[[str], None], tmp_path: Path) -> None:
    platform("prefer: vendor\n")
    (tmp_path / "config" / "other.yaml").write_text("prefer: reference\n")
    assert load(VLLM_FL_PLATFORM="other").policy.prefer == "reference"


def test_the_config_file_beats_everything(
    platform: Callable[[str], None], write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    platform("strict: true\nflagos_blacklist: [mm]\n")
    found = load(
        VLLM_FL_CONFIG=write("prefer: reference\n"),
        VLLM_FL_PREFER="vendor",
        VLLM_FL_PER_OP="rms_norm=vendor",
        VLLM_FL_DENY_VENDORS="cuda",
    )
    assert found.policy.prefer == "reference"
    assert (
        found.policy.strict,
        found.policy.flagos_blacklist,
        found.policy.per_op_order,
        found.policy.deny_vendors,
    ) == (False, set(), (), set())
    ignored = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
    assert [name for text in ignored for name in re.findall("VLLM_FL_[A-Z_]+", text)] == [
        "VLLM_FL_PREFER",
        "VLLM_FL_PER_OP",
        "VLLM_FL_DENY_VENDORS",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_variables_without_a_key_act_beside_the_config_file(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    found = load(
        VLLM_FL_CONFIG=write("flagos_blacklist: [mm]\n"),
        VLLM_FL_FLAGOS_WHITELIST="rms_norm",
        VLLM_FL_OOT_ENABLED="0",
        VLLM_FL_LOG_LEVEL="ERROR",
        USE_FLAGGEMS="0",
    )
    assert (found.policy.flagos_whitelist, found.oot_enabled, found.log_level) == ({"rms_norm"}, False, "ERROR")
    assert not found.policy.use_flaggems
    assert not caplog.records


@pytest.mark.parametrize("kind", ["FLAGOS", "OOT"])
def test_a_white_list_and_a_blacklist_exclude_each_other(kind: str) -> None:
    lists = {f"VLLM_FL_{kind}_WHITELIST": "rms_norm", f"VLLM_FL_{kind}_BLACKLIST": "silu_and_mul"}
    refused(f"VLLM_FL_{kind}_WHITELIST.*exclude each other.*VLLM_FL_{kind}_BLACKLIST", **lists)


def test_an_oot_white_list_leaves_no_say_to_the_blacklist() -> None:
    both = Settings(oot_whitelist=frozenset({"rms_norm"}), oot_blacklist=frozenset({"rms_norm"}))
    assert both.registers("RMSNorm", "rms_norm")
    assert not both.registers("SiluAndMul", "silu_and_mul")
    assert not Settings(oot_blacklist=frozenset({"SiluAndMul"})).registers("SiluAndMul", "silu_and_mul")
    assert not Settings(oot_enabled=False).registers("rms_norm")
    assert not Settings.of(enabled=False).registers("rms_norm")


@pytest.mark.parametrize("variable", [variable.name for item in ITEMS for variable in item.variables])
def test_an_empty_variable_is_unset(variable: str) -> None:
    assert load(**{variable: ""}) == load(**{variable: "  "}) == Settings()


def test_under_another_host_its_prefix_is_read_first() -> None:
    environ = {"SGLANG_FL_PREFER": "reference", "VLLM_FL_PREFER": "vendor", "VLLM_FL_STRICT": "1"}
    found = load_settings(environ, prefixes=("SGLANG_FL_", "VLLM_FL_"))
    assert (found.policy.prefer, found.policy.strict) == ("reference", True)
    assert str(found.origin("prefer")) == "environment variable SGLANG_FL_PREFER"
    assert load_settings(environ).policy.prefer == "vendor"


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("VLLM_FL_PREFFER", "VLLM_FL_PREFER"),
        ("VLLM_FL_DENY_VENDOR", "VLLM_FL_DENY_VENDORS"),
        ("VLLM_FL_STRCIT", "VLLM_FL_STRICT"),
        ("vllm_fl_prefer", "VLLM_FL_PREFER"),
    ],
)
def test_a_near_miss_of_a_variable_is_refused(name: str, meant: str) -> None:
    refused(f"environment variable {name}: there is no such variable; did you mean {meant}", **{name: "x"})


def test_a_variable_that_resembles_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert load(VLLM_FL_COFFEE="1", OTHER_PREFERR="x") == Settings()
    assert ["VLLM_FL_COFFEE" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    "environ",
    [
        {"VLLM_FL_PER_OP": "mul=flagos"},
        {"VLLM_FL_OOT_BLACKLIST": "custom_op1"},
        {"VLLM_FL_ALLOW_VENDORS": "vendor_a"},
        {"VLLM_FL_DENY_VENDORS": "npu"},
        {"VLLM_FL_PER_OP": "rms_norm=vendor:vendor_a"},
        {"VLLM_FL_PER_OP": "paged_attention_v2=flagos"},
    ],
)
def test_a_name_that_resembles_nothing_is_a_warning(environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    load_settings(environ)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert next(iter(environ)) in caplog.text


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts' plugins have registered their classes."""
    monkeypatch.setattr(names, "_layers", {})
    register_layers("one", ["RMSNorm", "RMSNormGated", "MoERunner"])
    register_layers("other", ["TopK", "SiluAndMul"])


@pytest.mark.parametrize("name", ["RMSNormGated", "MoERunner", "TopK", "rms_norm"])
@pytest.mark.usefixtures("layers")
def test_the_classes_that_plugins_register_are_known(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert load(VLLM_FL_OOT_WHITELIST=name).oot_whitelist == {name}
    assert not caplog.records


@pytest.mark.usefixtures("layers")
def test_a_near_miss_of_a_registered_class_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean TopK"):
        load(VLLM_FL_OOT_WHITELIST="Topk")


@pytest.mark.usefixtures("layers")
def test_an_operator_of_pytorchs_is_no_near_miss_of_ours() -> None:
    assert load(VLLM_FL_OOT_BLACKLIST="relu").oot_blacklist == {"relu"}


def test_without_a_plugin_no_class_is_judged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(names, "_layers", {})
    assert load(VLLM_FL_OOT_WHITELIST="SiluAndMul").oot_whitelist == {"SiluAndMul"}
    assert not caplog.records
    with pytest.raises(ConfigError, match="did you mean rms_norm"):
        load(VLLM_FL_OOT_WHITELIST="rms_nrom")


def test_every_vendor_that_has_a_backend_or_settings_here_is_known() -> None:
    folders = {file.parent.name for file in Path(vendor.__path__[0]).glob("*/__init__.py")}
    assert {"cpu", "cuda", "template"} <= folders <= set(names.vendors())
    assert "ascend" in names.vendors()


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_declared_operator_is_known(name: str, caplog: pytest.LogCaptureFixture) -> None:
    load(VLLM_FL_PER_OP=f"{name}=reference", VLLM_FL_OOT_BLACKLIST=name, VLLM_FL_FLAGOS_BLACKLIST=name)
    assert not caplog.records


# -- YAML files -------------------------------------------------------------------------------------------------------

EVERYTHING = """
prefer: vendor
strict: yes
allow_vendors: [cuda]
deny_vendors:
  - ascend
op_backends:
  rms_norm: [vendor, flagos]
  rms_norm@model.layers.3.*: [reference]
flagos_blacklist: [to_copy, zeros, mm]
oot_blacklist: [fused_moe]
unused_tensors: ["*.extra.*"]
aten_replacement: true
aten_blacklist: ["aten::cumsum.out", log_]
chip_features: false
shadow_share: 0.02
shadow_operators: [rms_norm, linear]
shadow_second: impl:default.triton
shadow_action: ban
shadow_budget: 1
damaged_requests: end
op_tuned:
  silu_and_mul:
    - when: {dtype: bfloat16, tokens: [1, 256], phase: decode}
      order: [impl:default.triton, vendor]
    - when: {tokens: [257, null]}
      order: [vendor]
    - order: [flagos]
"""


def test_a_yaml_file_may_set_every_key(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    found = load_config_file(write(EVERYTHING))
    assert found == Settings.of(
        prefer="vendor",
        strict=True,
        allow_vendors=frozenset({"cuda"}),
        deny_vendors=frozenset({"ascend"}),
        per_op_order=(("rms_norm", ("vendor", "flagos")), ("rms_norm@model.layers.3.*", ("reference",))),
        flagos_blacklist=frozenset({"to_copy", "zeros", "mm"}),
        oot_blacklist=frozenset({"fused_moe"}),
        unused_tensors=frozenset({"*.extra.*"}),
        aten_replacement=True,
        aten_blacklist=frozenset({"aten::cumsum.out", "log_"}),
        chip_features=False,
        shadow_share=0.02,
        shadow_operators=frozenset({"rms_norm", "linear"}),
        shadow_second="impl:default.triton",
        shadow_action="ban",
        shadow_budget=1.0,
        damaged_requests="end",
        op_tuned=(
            (
                "silu_and_mul",
                (
                    TunedRule(
                        dtype="bfloat16", tokens=(1, 256), phase="decode", order=("impl:default.triton", "vendor")
                    ),
                    TunedRule(tokens=(257, None), order=("vendor",)),
                    TunedRule(order=("flagos",)),
                ),
            ),
        ),
    )
    assert str(found.origin("per_op_order.rms_norm")).endswith("user.yaml, line 8")
    assert {item.yaml_key for item in ITEMS if item.yaml_key} == set(re.findall("^[a-z_]+", EVERYTHING, re.M))
    assert not caplog.records


def test_an_empty_list_allows_nobody(write: Write) -> None:
    assert load_config_file(write("allow_vendors: []\n")).policy.allow_vendors == frozenset()
    assert load_config_file(write("prefer: flagos\n")).policy.allow_vendors is None


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "{}\n", "\ufeffprefer: flagos\n"])
def test_an_empty_file_sets_nothing(text: str, write: Write) -> None:
    assert load_config_file(write(text)) == Settings()


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('strict: "yes please"', 1, "strict: must be true or false, not 'yes please'"),
        ("prefer: 3", 1, "prefer: must be a string, not 3"),
        ("prefer: venodr", 1, "prefer: Invalid prefer value 'venodr'; did you mean vendor"),
        ("\nprefer: flagos\nprefer: vendor", 3, "prefer: is there twice"),
        ("prefre: vendor", 1, "prefre: unknown key; did you mean prefer"),
        ("coffee: vendor", 1, "coffee: unknown key; valid: allow_vendors"),
        ("log_level: DEBUG", 1, "set by the environment variable VLLM_FL_LOG_LEVEL"),
        ("- prefer", 1, "must be a mapping of settings"),
        ("prefer", 1, "must be a mapping of settings"),
        ("prefer:", 1, "prefer: has no value"),
        ("prefer: [vendor]", 1, "prefer: must be a string"),
        ("allow_vendors: cuda", 1, "allow_vendors: must be a list, not 'cuda'"),
        ("allow_vendors:\n  - cuda\n  - 7", 3, r"allow_vendors\[1\]: must be a string, not 7"),
        ("deny_vendors:\n- cudaa", 2, r"deny_vendors\[0\]: unknown vendor 'cudaa'; did you mean cuda"),
        ("op_backends: [rms_norm]", 1, "op_backends: must be a mapping"),
        ("op_backends:\n  rms_norm: vendor", 2, "op_backends.rms_norm: must be a list"),
        ("op_backends:\n  rms_norm: []", 2, "op_backends.rms_norm: the order is empty"),
        ("op_backends:\n  rms_norm:\n  - vendor\n  - vendr", 4, r"unknown token 'vendr'; did you mean vendor"),
        ("op_backends:\n  rms_nrom: [vendor]", 2, "unknown operator 'rms_nrom'; did you mean rms_norm"),
        ("op_backends: {rms_norm: [vendor], rms_norm: [flagos]}", 1, "rms_norm: is there twice"),
        ("op_backends: {1: [vendor]}", 1, "a key must be a string"),
        ("op_backends: {[a]: [vendor]}", 1, "a key must be a string"),
        ("oot_blacklist: [rms_nrom]", 1, "did you mean rms_norm"),
        ("flagos_blacklist: [rms_nrom]", 1, "did you mean rms_norm"),
        ("flagos_blacklist: ['']", 1, "'' is not a name"),
        ("prefer: 2020-13-45", 1, "only strings, numbers and booleans"),
        ("prefer: !!int x", 1, "is not a value of type int"),
        ("strict: !!bool x", 1, "is not a value of type bool"),
        ("prefer: !!python/object/apply:os.system [id]", 1, "is not allowed"),
        ("prefer: !custom x", 1, "only strings, numbers and booleans"),
        ("prefer: &a vendor\nallow_vendors: [*a]", 2, "aliases are not allowed"),
        ("a: &a [x]\n<<: *a", 2, "aliases are not allowed"),
        ("prefer: [", 1, "is not valid YAML"),
        ("prefer: vendor\n---\nprefer: flagos", 2, "is not valid YAML"),
        ("prefer: \x01", None, "is not valid YAML"),
        ("op_tuned: {rms_norm: [{order: []}]}", 1, r"op_tuned.rms_norm\[0\].order: the order is empty"),
        ("op_tuned: {rms_norm: []}", 1, "has no rules"),
        ("op_tuned: {rms_norm: [{when: {}}]}", 1, "order: is missing"),
        ("op_tuned: {rms_norm: [vendor]}", 1, "must be a mapping, not 'vendor'"),
        ("op_tuned: {rms_norm: [{oder: [vendor]}]}", 1, "order: is missing|unknown key; did you mean order"),
        ("op_tuned: {rms_norm: [{when: {dtpe: int8}, order: [vendor]}]}", 1, "unknown key; did you mean dtype"),
        ("op_tuned: {rms_norm: [{when: {dtype: bfloat}, order: [vendor]}]}", 1, "Invalid dtype.*mean bfloat16"),
        ("op_tuned: {rms_norm: [{when: {phase: decod}, order: [vendor]}]}", 1, "Invalid phase.*mean decode"),
        ("op_tuned: {rms_norm: [{when: {tokens: 7}, order: [vendor]}]}", 1, "tokens: must be a list"),
        ("op_tuned: {rms_norm: [{when: {tokens: [7]}, order: [vendor]}]}", 1, r"must be \[least, most\]"),
        ("op_tuned: {rms_norm: [{when: {tokens: [7, 6]}, order: [vendor]}]}", 1, r"must be \[least, most\]"),
        ("op_tuned: {rms_norm: [{when: {tokens: [null, 6]}, order: [vendor]}]}", 1, r"must be \[least, most\]"),
        ("op_tuned: {rms_norm: [{when: {tokens: [true, 6]}, order: [vendor]}]}", 1, "valid integer"),
        (f"op_tuned: {{rms_norm: [{{when: {{tokens: [0x{'f' * 90}, 6]}}}}]}}", 1, "number is too large"),
        ("op_tuned: {rms_norm: [{order: [vendor]}, {order: [flagos]}]}", 1, "never reached"),
        ("prefer: " + "9" * 5000, 1, "the number is too long"),
        ("a: " + "[" * 5000, None, "nested too deeply"),
    ],
)
def test_a_wrong_yaml_file_is_refused_by_line(text: str, line: int | None, problem: str, write: Write) -> None:
    path = write(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_config_file(path)
    assert caught.value.source == (path if line is None else f"{path}, line {line}")
    assert len(str(caught.value)) < 800


def test_a_missing_file_is_a_file_not_found_error() -> None:
    with pytest.raises(ConfigFileNotFoundError, match="/nonexistent/x.yaml: config file not found") as caught:
        load(VLLM_FL_CONFIG="/nonexistent/x.yaml")
    assert isinstance(caught.value, FileNotFoundError)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    refused("is a directory", VLLM_FL_CONFIG=str(tmp_path))
    refused("not a regular file", VLLM_FL_CONFIG="/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    refused("not a regular file", VLLM_FL_CONFIG=str(tmp_path / "fifo"))
    refused("cannot be read", VLLM_FL_CONFIG="/dev/null/x")
    refused("cannot be read", VLLM_FL_CONFIG="x" * 5000)
    refused("cannot be read", VLLM_FL_CONFIG="a\0b")


def test_an_unreadable_file_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    path = write("prefer: vendor\n")
    monkeypatch.setattr(os, "open", denied)
    refused("Permission denied", VLLM_FL_CONFIG=path)


def test_a_large_file_is_refused(write: Write) -> None:
    refused("is larger than 262144 bytes", VLLM_FL_CONFIG=write("#" * (1 << 18) + "\n"))


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"prefer: \xff\xfe")
    refused("is not UTF-8", VLLM_FL_CONFIG=str(tmp_path / "x.yaml"))


def test_a_link_that_the_user_named_is_followed(write: Write, tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to(write("prefer: vendor\n"))
    assert load(VLLM_FL_CONFIG=str(tmp_path / "link.yaml")).policy.prefer == "vendor"


def test_a_broken_platform_file_is_refused(platform: Callable[[str], None]) -> None:
    platform("prefer: vndor\n")
    with pytest.raises(ConfigError, match=r"chip.yaml \(platform\), line 1: prefer"):
        load()


# -- platform files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "ascend"])
def test_the_platform_files_are_right(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert name in config.list_platforms()
    assert config.load_platform_config(name) == {"prefer": "flagos"}
    assert not caplog.records


@pytest.mark.parametrize("name", ["cuda", "cuda-h100", "cuda-h200"])
def test_on_nvidia_gpus_our_kernels_come_before_flaggems(name: str, caplog: pytest.LogCaptureFixture) -> None:
    found = config.load_platform_config(name)["op_tuned"]
    manager = get_default_manager()
    manager.ensure_initialized()
    both = {"default.flagos", "default.triton"}
    contested = [
        op_name
        for op_name, impls in manager.registry.snapshot().impls_by_op.items()
        if both <= {impl.impl_id for impl in impls}
    ]
    assert contested
    for op_name in contested:
        assert found[op_name] == [{"order": ["impl:default.triton"]}]
    assert not caplog.records


def test_an_unknown_platform_has_no_file() -> None:
    assert config.get_config_path("../cpu") is None
    with pytest.raises(ConfigError, match="did you mean cuda"):
        config.load_platform_config("cdua")


def test_a_machine_whose_device_has_no_file_uses_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "detect_platform", lambda: "toaster")
    assert load() == Settings()


# -- the object -------------------------------------------------------------------------------------------------------


def example(write: Write) -> Settings:
    return load(VLLM_FL_CONFIG=write(EVERYTHING), VLLM_FL_FLAGOS_WHITELIST="mm", VLLM_FL_PLUGIN_MODULES="a,b")


@pytest.mark.parametrize(
    "travel", [lambda s: Settings.from_json(s.to_json()), lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy]
)
def test_settings_travel_without_loss(travel: Callable[[Settings], Settings], write: Write) -> None:
    before = example(write)
    after = travel(before)
    assert after == before
    assert after.origins == before.origins
    assert hash(after) == hash(before)
    assert [type(getattr(after, f.name)) for f in dataclasses.fields(after)] == [
        type(getattr(before, f.name)) for f in dataclasses.fields(before)
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"prefer": "vendor"}', "[" * 100_000])
def test_settings_of_another_version_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="settings of another process"):
        Settings.from_json(text)


def test_a_path_that_is_not_unicode_travels() -> None:
    before = load(FLAGCX_PATH=os.fsdecode(b"/opt/caf\xe9"))
    assert Settings.from_json(before.to_json()) == before


def test_settings_do_not_change(write: Write) -> None:
    found = example(write)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.policy.prefer = "vendor"  # type: ignore[misc]
    with pytest.raises(TypeError):
        found.origins["prefer"] = Origin("code")  # type: ignore[index]


def test_origins_are_no_part_of_the_value() -> None:
    assert load(VLLM_FL_PREFER="vendor") == Settings.of(prefer="vendor")
    assert hash(load(VLLM_FL_PREFER="vendor")) == hash(Settings.of(prefer="vendor"))


def test_a_value_from_code_says_so() -> None:
    assert str(Settings.of(prefer="vendor").origin("prefer")) == "code"
    assert str(Settings().origin("prefer")) == "default"
    with pytest.raises(KeyError):
        Settings().origin("coffee")


def test_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_settings()
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    first = get_settings()
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    assert get_settings() is first
    reset_settings()
    assert get_settings().policy.prefer == "reference"


def test_a_worker_adopts_its_parents_settings() -> None:
    theirs = install_settings(Settings.of(prefer="reference"))
    assert get_settings() is theirs


def test_the_hosts_prefixes_stay_until_they_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FL_PREFER", "reference")
    reset_settings(("SGLANG_FL_", "VLLM_FL_"))
    try:
        assert get_settings().policy.prefer == "reference"
        reset_settings()
        assert get_settings().policy.prefer == "reference"
    finally:
        reset_settings(("VLLM_FL_",))
    assert get_settings().policy.prefer == "flagos"


def test_wrong_settings_are_wrong_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_settings()
    monkeypatch.setenv("VLLM_FL_PREFER", "vender")
    for _ in range(2):
        with pytest.raises(ConfigError):
            get_settings()


def test_importing_settings_imports_no_host() -> None:
    code = "import sys, fl_dispatch.settings; assert not {'vllm', 'triton', 'sglang'} & set(sys.modules)"
    environ = {"PYTHONPATH": str(Path(settings.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=120)


# -- the table and the page -------------------------------------------------------------------------------------------


def test_the_table_has_every_field_once() -> None:
    fields = [field.name for kind in (Settings, SelectionPolicy) for field in dataclasses.fields(kind)]
    derived = ["policy", "origins", "origins", "platform_file"]
    assert sorted([*(item.field for item in ITEMS), *derived]) == sorted(fields)


def test_the_hosts_own_variables_are_not_ours() -> None:
    assert not {"VLLM_BATCH_INVARIANT", "VLLM_LOGGING_LEVEL"} & set(variable_names())
    assert len(variable_names()) == len(set(variable_names())) == 38


def rows() -> dict[str, list[str]]:
    """The page's table by variable (by YAML key where there is none)."""
    cells = [[cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")] for line in page().splitlines()
             if line.startswith("| `")]  # fmt: skip
    return {row[0]: row for row in cells if len(row) == 5}


def page() -> str:
    return DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.field)
def test_the_page_agrees_with_the_table(item: Any) -> None:
    for name in [variable.name for variable in item.variables] or [item.yaml_key]:
        _, key, default, effect, test = rows()[name]
        assert key == (item.yaml_key or "-")
        assert default == shown(item.field)
        assert effect.startswith(item.doc)
        assert test in globals(), f"no test {test}"


def shown(field: str) -> str:
    value = Settings().value(field)
    if field == "oplist_path":
        return "(a cache file)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}"
    return str(value) if isinstance(value, str) else "(none)"


def test_the_page_has_no_other_variable() -> None:
    ours = {*variable_names(), "VLLM_BATCH_INVARIANT", "VLLM_LOGGING_LEVEL"}
    assert set(re.findall(r"\bVLLM_FL_[A-Z_]+[A-Z]\b", page())) - {"VLLM_FL_PREFFER"} <= ours
    assert set(rows()) == ours | {"op_tuned"}


def test_the_pages_examples_are_right(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", page(), re.S)
    assert len(examples) >= 2
    for text in examples:
        load_config_file(write(text))
    exports = re.findall(r"^export ([A-Z_]+)=(\"?)(.*?)\2(?:\s+#.*)?$", page(), re.M)
    for name, _, value in exports:
        if name not in ("VLLM_FL_CONFIG", "VLLM_FL_OP_CONFIG"):
            load_settings({name: value})
    assert len(exports) >= 5
    assert json.loads(re.findall(r"```json\n(.*?)```", page(), re.S)[0])

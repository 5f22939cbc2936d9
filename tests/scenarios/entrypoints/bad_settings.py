"""Settings with which every host must exit: one line states the error, its place, and the right value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FILES = {
    "unknown_key": "prefr: vendor\n",
    "wrong_type": "strict: sometimes\n",
    "bad_token": "op_backends:\n  rms_norm: [vendor, refrence]\n",
    "near_miss": "op_backends:\n  rms_nrom: [reference]\n",
    "bad_value": "prefer: fastest\n",
}
"""Case → the text of its settings file."""

Case = tuple[dict[str, str], str]
"""Variables, possibly with one of the files in ``FL_CONFIG``, and a pattern of the error's line."""


def cases(prefix: str) -> dict[str, Case]:
    """Return case → the variables that are set for one host, and a pattern of the error.

    Args:
        prefix: ``VLLM_FL`` or ``SGLANG_FL``.
    """
    file = f"{prefix}_CONFIG"
    return {
        "unknown_key": ({file: "unknown_key"}, r"ConfigError: .*unknown_key\.yaml, line 1.*prefr.*prefer"),
        "wrong_type": ({file: "wrong_type"}, r"ConfigError: .*wrong_type\.yaml, line 1.*strict.*sometimes"),
        "bad_token": ({file: "bad_token"}, r"ConfigError: .*bad_token\.yaml, line 2.*refrence.*reference"),
        "near_miss": ({file: "near_miss"}, r"ConfigError: .*near_miss\.yaml, line 2.*rms_nrom.*rms_norm"),
        "bad_value": ({file: "bad_value"}, r"ConfigError: .*bad_value\.yaml, line 1.*prefer.*fastest"),
        "missing_file": ({file: "/nowhere/fl.yaml"}, r"ConfigFileNotFoundError: .*/nowhere/fl\.yaml"),
        "variable": ({f"{prefix}_PREFER": "vendr"}, rf"ConfigError: .*{prefix}_PREFER.*vendr.*vendor"),
        "near_miss_variable": (
            {f"{prefix}_PREFFER": "vendor"},
            rf"ConfigError: .*{prefix}_PREFFER.*{prefix}_PREFER",
        ),
        "both_lists": (
            {f"{prefix}_OOT_WHITELIST": "rms_norm", f"{prefix}_OOT_BLACKLIST": "rotary_embedding"},
            rf"ConfigError: .*{prefix}_OOT_(WHITE|BLACK)LIST",
        ),
        "plugin_module": (
            {f"{prefix}_PLUGIN_MODULES": "no_such_plugin"},
            r"PluginLoadError: .*no_such_plugin",
        ),
        "duplicate_id": (
            {f"{prefix}_PLUGIN_MODULES": "duplicate_plugin"},
            r"RegistrationError: .*vendor\.twice.*silu_and_mul",
        ),
        "no_library": (
            {"FLAGCX_PATH": "/nowhere"},
            r"ConfigError: environment variable FLAGCX_PATH: /nowhere: .*unset",
        ),
        "nothing_left": ({f"{prefix}_PER_OP": "rms_norm=vendor:nobody"}, r"ConfigError: .*rms_norm"),
    }


def write(folder: Path) -> None:
    """Write the settings files."""
    for name, text in FILES.items():
        (folder / f"{name}.yaml").write_text(text)


def located(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables with the path of the named settings file, if any."""
    return {name: str(folder / f"{value}.yaml") if value in FILES else value for name, value in variables.items()}

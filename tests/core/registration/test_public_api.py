"""The documented names, under both import paths, as the same objects."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

BY_MODULE = {
    "": """call_op resolve_op bind_op explain get_default_manager reset_default_manager OpManager OpRegistry
        OpRegistrySnapshot OpImpl BackendImplKind BackendPriority match_token SelectionPolicy PolicyManager get_policy
        set_global_policy reset_global_policy get_policy_epoch policy_context policy_from_config with_strict_mode
        with_preference with_allowed_vendors with_denied_vendors PREFER_DEFAULT PREFER_VENDOR PREFER_REFERENCE
        VALID_PREFER_VALUES discover_plugins get_discovered_plugins clear_discovered_plugins PLUGIN_GROUP
        PLUGIN_MODULES_ENV get_logger set_log_level""",
    "types": "OpImpl BackendImplKind BackendPriority match_token",
    "registry": "OpRegistry OpRegistrySnapshot",
    "policy": """SelectionPolicy PolicyManager get_policy set_global_policy reset_global_policy get_policy_epoch
        policy_context policy_from_config with_strict_mode with_preference with_allowed_vendors with_denied_vendors
        PREFER_DEFAULT PREFER_VENDOR PREFER_REFERENCE VALID_PREFER_VALUES""",
    "manager": "OpManager get_default_manager reset_default_manager call_op resolve_op bind_op explain",
    "discovery": "discover_plugins get_discovered_plugins clear_discovered_plugins PLUGIN_GROUP PLUGIN_MODULES_ENV",
    "ops": "OPERATORS Operator",
    "builtin_ops": "register_builtins",
    "logger_manager": "get_logger set_log_level",
    "config": "load_platform_config get_config_path",
    "backends.base": "Backend",
}


@pytest.mark.parametrize("module", BY_MODULE)
def test_every_documented_name_is_there_under_both_paths(module: str) -> None:
    suffix = f".{module}" if module else ""
    ours, documented = (
        importlib.import_module(f"fl_dispatch{suffix}"),
        importlib.import_module(f"vllm_fl.dispatch{suffix}"),
    )
    assert ours is documented
    missing = [name for name in BY_MODULE[module].split() if not hasattr(ours, name)]
    assert missing == []


def test_the_package_lists_what_it_exports() -> None:
    import fl_dispatch

    assert set(BY_MODULE[""].split()) <= set(fl_dispatch.__all__)
    assert all(hasattr(fl_dispatch, name) for name in fl_dispatch.__all__)


def test_importing_the_core_imports_no_host_no_triton_and_no_vendor_library() -> None:
    code = (
        "import sys, fl_dispatch, fl_dispatch.cli\n"
        "unwanted = {'vllm', 'sglang', 'triton', 'flag_gems', 'torch_npu', 'transformers', 'torch._dynamo'}\n"
        "bad = unwanted & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_running_an_operator_imports_no_host() -> None:
    code = (
        "import sys, torch\nfrom fl_dispatch import call_op\ncall_op('silu_and_mul', torch.ones(1, 4))\n"
        "bad = {'vllm', 'sglang', 'triton', 'torch._dynamo'} & set(sys.modules)\nsys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_examples_run() -> None:
    import doctest

    from fl_dispatch.manager import calls

    result = doctest.testmod(calls)
    assert result.attempted >= 4
    assert result.failed == 0

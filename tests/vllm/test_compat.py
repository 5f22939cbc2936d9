"""What is replaced in the host exists in the host."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import vllm_fl
from vllm_fl import compat, host_names
from vllm_fl.compat import detection, kernels, replacements, versions

PACKAGE = Path(vllm_fl.__file__).parent


def test_every_replaced_attribute_exists_in_this_host() -> None:
    assert replacements.check_targets(versions.host_version()) == []


def test_every_replacement_says_why() -> None:
    assert all(row.reason for row in replacements.REPLACEMENTS)


def test_a_target_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = ("vllm.envs:no_such_attribute", "vllm.no_such_module:thing")
    rows = tuple(replacements.Replacement(target, "because.", ("0.99",)) for target in targets)
    monkeypatch.setattr(replacements, "REPLACEMENTS", rows)
    told = [f"{target} is gone in vLLM 0.99: because." for target in targets]
    assert replacements.check_targets("0.99") == told
    assert replacements.check_targets("0.98") == []


def test_every_name_that_our_classes_rely_on_exists_in_this_host() -> None:
    assert host_names.missing(versions.host_version()) == []


@pytest.mark.parametrize(
    ("owner", "name", "found"),
    [
        ("vllm.v1.worker.gpu_worker:Worker", "load_model", True),  # of the class
        ("vllm.compilation.passes.pass_manager:PostGradPassManager", "fix_functionalization", True),  # of an instance
        ("vllm.compilation.decorators", "do_not_compile", True),  # given to an object by a function of the module
        ("vllm.v1.worker.gpu_worker:Worker", "no_such_method", False),
        ("vllm.v1.worker.gpu_worker:NoSuchClass", "load_model", False),
        ("vllm.no_such_module:Worker", "load_model", False),
    ],
)
def test_a_name_that_moved_is_named_with_its_owner_and_who_relies_on_it(
    owner: str, name: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_names, "NAMES", (host_names.HostNames(owner, (name,), "worker"),))
    told = [f"{owner} has no {name} in vLLM 0.99, which vllm_fl.worker relies on"]
    assert host_names.missing("0.99") == ([] if found else told)


def test_every_private_name_of_the_host_that_this_package_uses_is_listed() -> None:
    files = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    trees = {str(file): ast.parse((PACKAGE / file).read_text()) for file in files}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    replaced = {row.target.rpartition(".")[2].rpartition(":")[2] for row in replacements.REPLACEMENTS}
    listed = {name for row in host_names.NAMES for name in row.names}
    pytorchs = {"_inductor", "_dynamo", "_C", "_construct_storage_from_data_pointer"}
    not_the_hosts = {"_asdict", "_function", "_real", *pytorchs}  # Python's, and of classes that derive from no host's
    allowed = ours | listed | replaced | not_the_hosts
    unlisted = {
        (file, node.attr)
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in allowed
    }
    assert unlisted == set()


def test_the_module_that_is_said_to_rely_on_a_name_has_it() -> None:
    for row in host_names.NAMES:
        text = PACKAGE.joinpath(*row.user.split(".")).with_suffix(".py").read_text()
        assert [name for name in row.names if not re.search(rf"\b{name}\b", text)] == [], row.user


def test_every_private_method_of_the_host_that_a_class_of_ours_overrides_is_listed() -> None:
    listed = {name for row in host_names.NAMES for name in row.names}
    folders = {"vllm_fl.": vllm_fl.__path__, "vllm_fl.compat.": compat.__path__}
    names = (module.name for start, path in folders.items() for module in pkgutil.iter_modules(path, start))
    for module in (importlib.import_module(name) for name in names if not name.endswith("_cuda")):
        for ours in vars(module).values():
            if isinstance(ours, type) and ours.__module__.startswith("vllm_fl."):
                hosts = [base for base in ours.__mro__ if base.__module__.startswith("vllm.")]
                shared = {name for name in vars(ours) if _is_private(name) and any(hasattr(b, name) for b in hosts)}
                assert shared - {"_enum", "_abc_impl"} <= listed, ours


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.AST) -> set[str]:
    """Functions, classes and variables that a module defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_slot_mapping_follows_the_block_table_and_pads_the_rest() -> None:
    block_size, table = 4, torch.tensor([[5, 9, 0], [2, 7, 1]], dtype=torch.int32)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    positions = torch.tensor([2, 3, 4, 0, 1, 2, 3, 4])
    slots = torch.full((10,), 77)
    kernels.slot_mapping(8, 10, starts, positions, table, 3, slots, block_size, 1, 0, 1, -1)
    expected = [5 * 4 + 2, 5 * 4 + 3, 9 * 4, 8, 9, 10, 11, 28, -1, -1]
    assert slots.tolist() == expected


def test_replacing_the_kernel_twice_replaces_it_once() -> None:
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    kernels.replace_kernels()
    first = ComputeSlotMappingKernel.kernel
    kernels.replace_kernels()
    assert ComputeSlotMappingKernel.kernel is first


def test_our_variables_are_known_to_vllm() -> None:
    from vllm import envs

    detection.declare_variables()
    assert {"VLLM_FL_PREFER", "VLLM_FL_CONFIG", "VLLM_FL_PER_OP"} <= set(envs.environment_variables)

"""The facts about vLLM have all that this package relies on; that vLLM has it: ``test_host_check.py``."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fl_transfer
import vllm_fl
from overridden import assert_listed, overridden
from vllm_fl.compat import detection, kernels
from vllm_fl.host import HOST

PACKAGES = pytest.mark.parametrize("package", [vllm_fl, fl_transfer], ids=["vllm_fl", "fl_transfer"])
"""Packages whose classes derive from vLLM's."""
LISTED = {name for fact in HOST.facts() for name in fact.plain_names}
LEFT_OUT = ("platform.cuda", ".dispatch")
"""Modules that need vLLM's compiled library, or are never executed."""


@PACKAGES
def test_every_private_name_of_the_host_that_a_package_uses_is_listed(package: ModuleType) -> None:
    folder = Path(package.__path__[0])
    trees = {str(file.relative_to(folder)): ast.parse(file.read_text()) for file in folder.rglob("*.py")}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    pytorchs = {"_inductor", "_dynamo", "_C", "_modules", "_artifacts"}
    not_the_hosts = {"_asdict", "_function", "_real", *pytorchs}  # Python's, and of classes that derive from no host's
    allowed = ours | LISTED | not_the_hosts
    unlisted = {
        (file, node.attr)
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in allowed
    }
    assert unlisted == set()


@PACKAGES
def test_every_name_of_the_host_that_a_class_of_ours_overrides_is_a_fact_with_the_parameters_that_ours_takes(
    package: ModuleType,
) -> None:
    least = {vllm_fl: 60, fl_transfer: 20}[package]
    assert assert_listed(HOST.facts(), list(overridden(package, "vllm", LEFT_OUT)), "0.32") > least


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _defined(tree: ast.AST) -> set[str]:
    """Functions, classes and variables that a module defines, and attributes of objects that are no host's."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.bases:
            stored = (part for part in ast.walk(node) if isinstance(part, ast.Attribute))
            found |= {part.attr for part in stored if isinstance(part.ctx, ast.Store) and _is_self(part.value)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
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


def test_slot_mapping_leaves_the_slots_of_tokens_that_no_request_covers() -> None:
    table, slots = torch.tensor([[5, 9]], dtype=torch.int32), torch.full((6,), 77)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    kernels.slot_mapping(5, 6, starts, torch.arange(5), table, 2, slots, 4, 1, 0, 1, -1)
    assert slots.tolist() == [20, 21, 22, 77, 77, -1]


def test_slot_mapping_does_not_wait_for_the_device() -> None:
    """PyTorch's device without memory raises where a value, or a shape that depends on values, is read."""
    with torch.device("meta"):
        starts, positions = torch.empty(3, dtype=torch.int32), torch.empty(8, dtype=torch.int64)
        table, slots = torch.empty(2, 3, dtype=torch.int32), torch.empty(10, dtype=torch.int64)
    kernels.slot_mapping(8, 10, starts, positions, table, 3, slots, 4, 1, 0, 1, -1)


def test_replacing_the_kernel_twice_replaces_it_once() -> None:
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    kernels.replace_kernels()
    first = ComputeSlotMappingKernel.kernel
    kernels.replace_kernels()
    assert ComputeSlotMappingKernel.kernel is first


CHOICES = """
import os
from vllm.config import VllmConfig
from vllm.triton_utils import HAS_TRITON
from vllm_fl.compat.model_runner import choice
print([VllmConfig().use_v2_model_runner for _ in range(2)], HAS_TRITON, os.environ.get("VLLM_USE_V2_MODEL_RUNNER"))
config = VllmConfig()
print(choice(config))
config.parallel_config.pipeline_parallel_size = 2
config.parallel_config.distributed_executor_backend = "external_launcher"
print(choice(config))
config.parallel_config.enable_batch_sharded_sampling = True
print(choice(config))
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
print(choice(config))
"""


def test_vllms_own_rule_chooses_the_runner_and_leaves_nothing_in_the_environment() -> None:
    """In a process of its own, where vLLM believes that Triton has a driver: that is so on a machine with a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    done = subprocess.run(
        [sys.executable, "-c", CHOICES], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines()[-5:] == [
        "[True, True] True None",
        "V2, because vLLM prefers it and it has all that is asked for (its kernels in our forms)",
        "V1, because V2 lacks pipeline parallelism with external_launcher",
        "V1, because V2 lacks pipeline parallelism with external_launcher, sampling divided among ranks without Triton",
        "V1, because VLLM_USE_V2_MODEL_RUNNER asks for it",
    ]


def test_our_variables_are_known_to_vllm() -> None:
    from vllm import envs

    detection.declare_variables()
    assert {"VLLM_FL_PREFER", "VLLM_FL_CONFIG", "VLLM_FL_PER_OP"} <= set(envs.environment_variables)


def test_a_process_without_an_engine_may_clean_up_as_vllms_examples_do() -> None:
    script = (
        "from vllm.distributed import cleanup_dist_env_and_memory as clean_up\n"
        "from vllm.platforms import current_platform\n"
        "assert current_platform.is_out_of_tree()\n"
        "clean_up()"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]

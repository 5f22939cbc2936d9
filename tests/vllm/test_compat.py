"""What is replaced in the host exists in the host."""

from __future__ import annotations

import pytest
import torch

from vllm_fl import compat


def test_every_replaced_attribute_exists_in_this_host() -> None:
    assert compat.check_targets() == []


def test_every_replacement_says_why() -> None:
    assert all(row.reason for row in compat.REPLACEMENTS)


def test_a_target_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = compat.Replacement("vllm.envs:no_such_attribute", "because.")
    monkeypatch.setattr(compat, "REPLACEMENTS", (row,))
    (problem,) = compat.check_targets()
    assert "vllm.envs:no_such_attribute" in problem


def test_slot_mapping_follows_the_block_table_and_pads_the_rest() -> None:
    block_size, table = 4, torch.tensor([[5, 9, 0], [2, 7, 1]], dtype=torch.int32)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    positions = torch.tensor([2, 3, 4, 0, 1, 2, 3, 4])
    slots = torch.full((10,), 77)
    compat.slot_mapping(8, 10, starts, positions, table, 3, slots, block_size, 1, 0, 1, -1)
    expected = [5 * 4 + 2, 5 * 4 + 3, 9 * 4, 8, 9, 10, 11, 28, -1, -1]
    assert slots.tolist() == expected


def test_replacing_the_kernel_twice_replaces_it_once() -> None:
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    compat.replace_kernels()
    first = ComputeSlotMappingKernel.kernel
    compat.replace_kernels()
    assert ComputeSlotMappingKernel.kernel is first


def test_our_variables_are_known_to_vllm() -> None:
    from vllm import envs

    compat.declare_variables()
    assert {"VLLM_FL_PREFER", "VLLM_FL_CONFIG", "VLLM_FL_PER_OP"} <= set(envs.environment_variables)

"""Hugging Face's side of a comparison reads the files that an engine reads."""

from __future__ import annotations

from pathlib import Path

import torch

import unfitting
from fl_dispatch.cli import small_model
from fl_dispatch.cli.network import network


def test_of_two_sets_of_weights_the_indexs_are_compared_with(tmp_path: Path) -> None:
    unfitting.two_sets(tmp_path / "two")
    made, single = (network(folder, torch.float32) for folder in (tmp_path / "two", small_model.CHECKPOINT))
    weight, other = (each.model.layers[1].mlp.down_proj.weight for each in (made, single))
    assert torch.equal(weight, other * 2)

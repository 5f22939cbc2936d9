"""The rotation that a configuration states is the one of Transformers' own network, for every family that is tested."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from architectures import ARCHITECTURES
from fl_dispatch.cli.checkpoints import FAMILIES, configuration
from fl_dispatch.hosting.positions import rotary_tables

NAMES = (*FAMILIES, *(name for name in ARCHITECTURES if name not in FAMILIES))


def _config(name: str) -> Any:
    import transformers

    if name in FAMILIES:
        return configuration(name)
    kind, shape = ARCHITECTURES[name]
    return getattr(transformers, kind)(**shape)


def _of_network(config: Any, layer: int) -> torch.Tensor | None:
    """Frequencies of a layer in Transformers' network, or ``None`` where it does not turn heads so."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_config(config)
    kinds = getattr(config, "layer_types", None) or ()
    names = ("inv_freq", *(f"{kinds[layer]}_inv_freq" for _ in kinds[:1]))
    found = [buffer for name, buffer in network.named_buffers() if name.rpartition(".")[2] in names]
    return found[0] if found else None


@pytest.mark.parametrize("name", NAMES)
def test_the_stated_rotation_is_that_of_transformers_network(name: str) -> None:
    config = _config(name)
    stated, network = rotary_tables.rotation(config, 0), _of_network(config, 0)
    if stated is None or network is None:
        pytest.skip("no rotation, or one that Transformers' shared functions do not compute")
    assert torch.allclose(stated.inverse, network.float().cpu(), rtol=1e-5, atol=1e-8)

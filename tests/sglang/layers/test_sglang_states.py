"""Layers with a state under SGLang on a CPU: delta nets, state spaces and short convolutions.

Slots hold NaN where SGLang would clear them. Wrong implementations run, and forgetful ones that leave a state as it is.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from serving import start

from fl_dispatch.backends.vendor.cpu.impl import plain
from host_engines import WRONG
from running import expected_tokens
from sampling import drawn
from states import OPERATORS, States, build

FORGETFUL = "vendor.forgetful"


class TestStates(States):
    MODELS = drawn(tuple(OPERATORS), 3, "models with states of SGLang")
    MISTAKES = {
        name: (
            *({operator: WRONG} for operator in operators),
            *({operator: FORGETFUL} for operator in operators if operator != "rms_norm_gated"),
        )
        for name, operators in OPERATORS.items()
    }
    OPTIONS = {"max_mamba_cache_size": 32}  # so few that they are used again
    PLACE = {
        "plugins": ("wrong_plugin", "forgetful_plugin", "used_slots"),
        "deny": "wrong,forgetful",
        "SGLANG_FL_PREFER": "reference",
        "SGLANG_FL_DAMAGED_REQUESTS": "ignore",  # a mistake may answer with NaN
    }


class TestRanks(TestStates):
    """Two of them, which divide the layers; the norm of Mamba 2 is SGLang's own where they share its mean."""

    MODELS = drawn(
        [name for name, operators in OPERATORS.items() if "rms_norm_gated" not in operators],
        1,
        "models with states on two ranks of SGLang",
    )
    MISTAKES = {}
    OPTIONS = {**TestStates.OPTIONS, "tp_size": 2}


def test_with_our_order_of_implementations_the_tokens_are_right_too(tmp_path: Path) -> None:
    """A library's products run then, and a linear layer that only holds a convolution's weight has none."""
    model = build("qwen3_5", tmp_path / "model")
    result = start(model, engine=TestStates.OPTIONS).result()
    assert result["steps"][0]["tokens"] == expected_tokens(model)
    product = "vendor.cpu.onednn" if plain.why_unavailable() else "vendor.cpu.cpp"
    assert result["report"]["counts"][f"linear {product}"] > 0
    assert result["report"]["native_layers"] == {}


def test_padding_beside_a_batch_that_decodes_has_the_slot_of_no_request(scheduler: None) -> None:
    """SGLang's slot of padding is -1, which would be the last slot of this layer or of the one before."""
    from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator

    from sglang_fl.bridge.states import Step

    slots = torch.tensor([3, 1, -1], dtype=torch.int32)
    cache = SimpleNamespace(conv=[torch.zeros(4, 2, 3)], temporal=torch.zeros(4, 1))
    metadata = SimpleNamespace(mamba_cache_indices=slots, query_start_loc=torch.arange(4, dtype=torch.int32))
    assert Step.described(cache, metadata, None, 0).slots.tolist() == [3, 1, 0]
    assert 0 not in MambaSlotAllocator(4, device="cpu").free_slots


def test_a_gate_may_be_a_view_of_the_projection_with_a_dimension_of_heads(scheduler: None) -> None:
    """So it is for prompts of Qwen3.5 on a GPU, where SGLang's norm reads rows of any strides."""
    from sglang_fl.bridge.rms_norm import GatedRMSNormBridge

    tokens, heads, size = 5, 2, 8
    how = {"activation": "silu", "group_size": None, "norm_before_gate": True, "eps": 1e-6}
    layer = SimpleNamespace(weight=torch.rand(size), **how)
    bridge = GatedRMSNormBridge(layer, None)  # type: ignore[arg-type]
    x, projected = torch.randn(tokens * heads, size), torch.randn(tokens, 3 * heads * size)
    gate = projected[:, 2 * heads * size :].view(tokens, heads, size)
    assert not gate.is_contiguous()
    torch.testing.assert_close(bridge.forward(x, gate), bridge.forward(x, gate.reshape(-1, size)))

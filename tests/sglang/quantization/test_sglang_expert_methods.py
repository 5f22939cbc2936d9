"""Quantized experts without an engine: the method that SGLang's layer gets, what it loads, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from single_layers import MIXTURE, mixture
from torch import nn

from quantized_checkpoints import AWQ, SCHEMES
from quantized_served import SIZE
from single_quantized import Layers, QuantizedExperts, load


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.inference_mode():
        yield


class TestExperts(QuantizedExperts):
    """The rules of every host."""


def test_ranks_divide_experts_between_blocks(scheduler: None) -> None:
    from fl_dispatch.hosting.quantized import schemes
    from fl_dispatch.hosting.quantized.stored_experts import Fp8BlockExperts, Parameters, Sizes

    parameters, kind = (
        Parameters(torch.nn.Module(), {"weight_loader": print}),
        Fp8BlockExperts(schemes.fp8("dynamic", [128, 128])),
    )
    said = kind.create_weights(parameters, Sizes(2, 128, 64, 2, ranks=2, dtype=torch.float32))
    assert said == "experts with 64 elements on a rank, not a multiple of a block's 128"
    assert not kind.create_weights(parameters, Sizes(2, 128, 64, 2, ranks=1, dtype=torch.float32))


def test_experts_that_are_loaded_in_a_way_of_their_own_are_refused(scheduler: None) -> None:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    class Own(FusedMoE):
        def weight_loader(self, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError

    with pytest.raises(ValueError, match="quantized experts that Own loads in a way of its own"):
        mixture(AWQ, kind=Own)
    with pytest.raises(ValueError, match="quantized experts that FusedMoE loads in a way of its own"):
        mixture(AWQ, use_weight_loader_fused=True)
    with pytest.raises(ValueError, match="quantized experts with biases"):
        mixture(AWQ, with_bias=True)
    with pytest.raises(ValueError, match="quantized experts with the activation 'tanh' in a mixture of experts yet"):
        mixture(AWQ, activation="tanh")


def test_quantized_experts_are_scaled_once(layers: Layers) -> None:
    """By us, unless the block around them does it."""
    from sglang_fl.layers import classes

    class Glm4MoeSparseMoeBlock(nn.Module):
        """Stands for the class of this name."""

        def __init__(self, experts: nn.Module) -> None:
            super().__init__()
            self.experts = experts

    x, found = torch.randn(3, SIZE), []
    for factor, block in ((1.0, nn.Module), (2.5, nn.Module), (2.5, Glm4MoeSparseMoeBlock)):
        layer = mixture(SCHEMES["awq"].config, routed_scaling_factor=factor)
        load(layer, "awq")
        layer.quant_method.process_weights_after_loading(layer)
        held = block(layer) if block is Glm4MoeSparseMoeBlock else nn.ModuleDict({"experts": layer})
        classes.prepare(nn.ModuleDict({"mlp": held}))
        assert layer.quant_method.kind.fl_scope == "mlp.experts"
        found.append(layers.computed(layer, x, 0))
    plain, scaled, by_block = found
    torch.testing.assert_close(scaled, 2.5 * plain)
    assert torch.equal(by_block, plain)


def test_quantized_experts_are_refused_where_their_references_come_first_on_an_accelerator(
    scheduler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_dispatch.devices import ASCEND
    from sglang_fl.quantization import configs

    monkeypatch.setattr(configs, "detect_device", lambda: ASCEND)
    with pytest.raises(
        ValueError,
        match=rf"quantized experts on ascend where their references, which wait for it, come first \({MIXTURE}\) yet",
    ):
        mixture(AWQ)

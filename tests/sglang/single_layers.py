"""Layers and arguments of SGLang in this process, without an engine; tests that use them ask for ``scheduler``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quantized_checkpoints import SCHEMES

PREFIX = "model.layers.0.mlp.down_proj"
MIXTURE = "model.layers.0.mlp.experts"
COUNT, HIDDEN, INNER = 2, 128, 128
"""Experts of a mixture, and their sizes."""


def made(config: dict[str, Any]) -> Any:
    """The configuration of a checkpoint."""
    from sglang_fl.quantization import config_class

    method = config["quant_method"] if config["quant_method"] in ("gptq", "awq", "compressed-tensors") else "fp8"
    found = config_class(method)
    assert found is not None
    return found.from_config(dict(config))  # type: ignore[attr-defined]


def layer_of(cls: type[nn.Module]) -> Any:
    """A layer of SGLang's that its constructor has not filled."""
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    return layer


def linear() -> Any:
    """A row-parallel product."""
    from sglang.srt.layers.linear import RowParallelLinear

    return layer_of(RowParallelLinear)


def mixture(config: Any, hidden: int = HIDDEN, inner: int = INNER, **options: Any) -> Any:
    """SGLang's layer of experts, built with a checkpoint's configuration."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    kind = options.pop("kind", FusedMoE)
    given = {"top_k": 1, "num_experts": COUNT, "hidden_size": hidden, "intermediate_size": inner, "layer_id": 0}
    quant_config = made(dict(config))
    return kind(**given, prefix=MIXTURE, params_dtype=torch.float32, quant_config=quant_config, **options)


def load(layer: Any, scheme: str, without: str = "", **sizes: int) -> list[dict[str, torch.Tensor]]:
    """Load random experts as SGLang's models do; the weights that they stand for."""
    generator, found = torch.Generator().manual_seed(0), []
    hidden, inner = sizes.get("hidden", HIDDEN), sizes.get("inner", INNER)
    for expert in range(COUNT):
        weights = {}
        for shard, target, shape in (
            ("w1", "w13", (inner, hidden)),
            ("w3", "w13", (inner, hidden)),
            ("w2", "w2", (hidden, inner)),
        ):
            stored, weights[shard] = SCHEMES[scheme].write(torch.randn(shape, generator=generator))
            for suffix, value in stored.items():
                name = f"{target}_{suffix}"
                if (name, expert) != (without, 1):
                    layer.weight_loader(getattr(layer, name), value, f"{MIXTURE}.{name}", shard, expert)
        found.append(weights)
    return found


def asked_of_sglang(given: dict[str, Any]) -> Any:
    """SGLang's arguments, with what a user gives."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="m", device="cpu")
    for name, value in given.items():
        setattr(args, name, value)
    return args

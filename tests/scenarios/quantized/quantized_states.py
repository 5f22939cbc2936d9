"""Models with state layers and quantized products: delta nets, state spaces and short convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import quantized_engines
import states
from host_engines import Host
from quantized_checkpoints import Scheme, Written
from quantized_engines import QuantizedEngines
from quantized_mixture import experts_kernel, operator
from quantized_network import Comparison

_DELTA: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_DELTA_AND_EXPERTS: Mapping[str, Any] = {
    **_DELTA,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts_per_tok": 4,  # all, because rounding changes close choices
}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5": _DELTA,  # four parts, stored as two products
    "qwen3_5_moe": _DELTA_AND_EXPERTS,
    "qwen3_next": _DELTA_AND_EXPERTS,
    # five parts, none of them a whole block of 128
    "mamba2": {"hidden_size": 128, "num_heads": 16, "intermediate_size": 256},
    "granitemoehybrid": {
        "hidden_size": 128,
        "mamba_n_heads": 16,
        "mamba_d_state": 16,
        "shared_intermediate_size": 128,
        "num_local_experts": 0,  # as Granite 4.0 Micro
    },
    "lfm2": {"hidden_size": 128, "conv_dim": 128, "block_dim": 128},
}
"""Architecture → sizes of its small checkpoint here: whole groups of 32, and some parts of whole blocks of 128."""
GROUPED: Mapping[str, Mapping[str, Any]] = {
    "nemotron_h": {"hidden_size": 128, "intermediate_size": 256, "mamba_num_heads": 16, "ssm_state_size": 32},
}
"""Sizes of models with a norm that has a mean for each group of a state, because two ranks need separate means."""
WITH_EXPERTS = "granitemoehybrid with experts"
GRANITE: Mapping[str, Mapping[str, Any]] = {
    WITH_EXPERTS: {
        **SIZES["granitemoehybrid"],
        "intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,  # all, because rounding changes close choices
    }
}
"""Sizes of a Granite 4 with experts, which its checkpoint stores in one tensor for each layer."""
WHOLE: Mapping[str, Any] = {"head_dim": 128}
"""Sizes of attention that two ranks divide into whole blocks of 128."""
SCHEMES_OF_STATES = (
    "compressed-tensors W8A8 int8",
    "compressed-tensors W8A8 fp8",
    "compressed-tensors W4A16",
    "fp8",
    "fp8, blocks of 128",
    "gptq",
    "awq",
)
PRODUCTS: Mapping[str, int] = {
    "qwen3_5": 16,
    "qwen3_5_moe": 16,
    "qwen3_next": 16,
    "mamba2": 8,
    "granitemoehybrid": 16,
    WITH_EXPERTS: 16,
    "lfm2": 16,
    "nemotron_h": 8,
}
"""Number of quantized products in all layers, merged as in vLLM, without experts."""
OF_SGLANG: Mapping[str, int] = {**PRODUCTS, "lfm2": 20}
"""The same, merged as in SGLang: LFM2's gate and up products stay separate."""
EXPERT_LAYERS: Mapping[str, int] = {"qwen3_5_moe": 4, "qwen3_next": 4, WITH_EXPERTS: 4}
PLANTED: Mapping[str, tuple[str, slice]] = {
    "qwen3_5": ("in_proj_z", slice(None)),  # the fourth part of ``in_proj_qkvz``
    "mamba2": ("in_proj", slice(-16, None)),  # the steps, the last of five parts
}
"""Architecture → the product with a wrong scale in one part of a merged one, and the rows of that scale."""
PLANTED_PAIRS = [("qwen3_5", "fp8"), ("mamba2", "compressed-tensors W4A16")]
FACTOR = 2.0
"""The factor of the wrong scale."""


def build(name: str, folder: Path, **sizes: Any) -> Path:
    """Write a model without quantization."""
    return states.build(architecture(name), folder, **{**{**SIZES, **GROUPED, **GRANITE}[name], **sizes})


def architecture(name: str) -> str:
    """Return the architecture of one of the models."""
    return name.partition(" ")[0]


@dataclass(frozen=True, eq=False)
class Run(quantized_engines.Run):
    """An engine with one of the models; ``sizes``: further ones."""

    model: str = "qwen3_5"
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model}, {self.scheme}, {self.kind}"


@dataclass(frozen=True, eq=False)
class Mistaken(Run):
    """A run with a wrong scale in one part of a merged product."""

    @property
    def made(self) -> Scheme:
        return _Planted(**vars(super().made), product=PLANTED[self.model])

    def __str__(self) -> str:
        return f"{super().__str__()}, a wrong scale"


@dataclass(frozen=True)
class _Planted(Scheme):
    product: tuple[str, slice] = ("", slice(None))

    def of(self, name: str) -> Scheme:
        module, rows = self.product
        if name.removesuffix(".weight").rpartition(".")[2] != module:
            return self

        def write(weight: Any) -> Written:
            stored, stands_for = self.write(weight)
            stored["weight_scale"][rows] *= FACTOR
            return stored, stands_for

        return replace(self, write=write)


class QuantizedStates(QuantizedEngines):
    """Engines with these models compute the dequantized network's results by our operators.

    As in published checkpoints, convolutions, decays and the small products of gates are not quantized.
    """

    MISTAKEN: ClassVar[Sequence[Mistaken]] = ()
    PRODUCTS: ClassVar[Mapping[str, int]] = PRODUCTS

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {**super().cases(), "mistaken": self.MISTAKEN}

    def served_runs(self) -> Sequence[quantized_engines.Run]:
        return [*self.MISTAKEN, *self.RUNS]

    def model(self, run: Run, folder: Path) -> Path:  # type: ignore[override]
        place = folder / "-".join((run.model, *map(str, run.sizes.values())))
        return place if place.exists() else build(run.model, place, **run.sizes)

    def wrong(self, run: quantized_engines.Run) -> Sequence[str]:
        return run.made.operators[-1:]

    def operators(self, run: Run) -> Sequence[str]:  # type: ignore[override]
        experts = [operator(run.made)] if run.model in EXPERT_LAYERS else []
        of_states = (name for name in states.OPERATORS[run.model] if name != "rms_norm_gated")  # a compiled model's own
        return (*run.made.operators, *of_states, *experts)

    def counted(self, run: Run, host: Host) -> Mapping[str, int]:  # type: ignore[override]
        experts = {experts_kernel(run.scheme): EXPERT_LAYERS[run.model]} if run.model in EXPERT_LAYERS else {}
        return {host.layers.get(run.scheme, run.made.layer): self.PRODUCTS[run.model], **experts}

    def test_a_wrong_scale_of_one_part_of_a_joined_product_shows(
        self, mistaken: Mistaken, compared: Callable[[Run], Comparison]
    ) -> None:
        assert compared(mistaken).error > compared(mistaken).right.rounding

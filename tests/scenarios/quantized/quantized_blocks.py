"""fp8 blocks that do not fit merged layers: models with layers, inputs and experts of partial blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantized_engines
from fl_dispatch.cli.checkpoints import build_checkpoint
from host_engines import Host, Served
from quantized_checkpoints import FP8, SCHEMES, Scheme, compressed, eight_bits, rows_of, whole
from quantized_engines import QuantizedEngines
from quantized_mixture import LAYERS as MIXED
from quantized_mixture import mixture

LAYERS = 3
"""Layers of the dense models."""
BLOCKS = SCHEMES["fp8, blocks of 128"]
COMPRESSED = Scheme(
    compressed(
        "float-quantized",
        {**whole("float", "block"), "block_structure": [128, 128]},
        {**whole("float", "group"), "group_size": 128, "dynamic": True},
    ),
    eight_bits(FP8, "block"),
    "Fp8BlockLayer",
    rows_of(FP8, group=128),
)
"""Weights of the same kind in the format of ``compressed-tensors``."""
SMALL: Mapping[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "q, k and v of 576, 192 and 192 rows": (
        "llama",
        {**SMALL, "hidden_size": 576, "intermediate_size": 1536},
    ),
    "k and v of half a block, gate and up of 224 rows, inputs of 192": (
        "qwen2",  # with biases
        {**SMALL, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 192, "intermediate_size": 224},
    ),
}
"""Uneven part → family and sizes. The first model has the sizes of a published one of 135 M parameters."""
UNEVEN, ODD = MODELS
EXPERTS = "experts of 224 elements"


def build(name: str, folder: Path) -> Path:
    """Write one of the models, or the one with experts, without quantization."""
    if name == EXPERTS:
        return mixture(folder, moe_intermediate_size=224, hidden_size=192)
    family, sizes = MODELS[name]
    return build_checkpoint(family, folder, **sizes)


@dataclass(frozen=True, eq=False)
class Run(quantized_engines.Run):
    """An engine with one of the models; ``written``: the format of its checkpoint."""

    model: str = ODD
    written: Scheme = BLOCKS

    @property
    def made(self) -> Scheme:
        return self.written

    def __str__(self) -> str:
        return f"{self.scheme}, {self.model}"


DENSE = (
    Run("compressed-tensors", model=UNEVEN, written=COMPRESSED),
    Run("fp8", model=ODD),
)


class QuantizedBlocks(QuantizedEngines):
    """Engines with each of the models."""

    RUNS = ALONE = (*DENSE, Run("fp8", model=EXPERTS))

    def model(self, run: quantized_engines.Run, folder: Path) -> Path:
        assert isinstance(run, Run)
        place = folder / str(self.RUNS.index(run))
        return place if place.exists() else build(run.model, place)

    def counted(self, run: quantized_engines.Run, host: Host) -> Mapping[str, int]:
        assert isinstance(run, Run)
        if run.model == EXPERTS:
            return {"Fp8BlockLayer": 2 * MIXED, "Fp8BlockExperts": MIXED}
        return {"Fp8BlockLayer": 4 * LAYERS}

    def test_no_other_kernel_of_blocks_is_in_it(
        self, run: Run, host: Host, served: Callable[[quantized_engines.Run], Served]
    ) -> None:
        for report in served(run).reports:
            found = {name: count for name, count in report["layers"].items() if "Block" in name}
            assert found == self.counted(run, host)

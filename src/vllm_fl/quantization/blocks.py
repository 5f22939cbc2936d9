"""Block scales as vLLM loads them, if merged layers or ranks' parts are not whole blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.model_executor.parameter import GroupQuantScaleParameter

from fl_dispatch.hosting.quantized import blocks, orders

from . import refused


def create_in_blocks(
    create: Callable[..., None],
    block: int,
    name: str,
    layer: Any,
    input_size_per_partition: int,
    output_partition_sizes: Sequence[int],
    input_size: int,
    output_size: int,
    params_dtype: torch.dtype,
    **named: Any,
) -> None:
    """Register a layer's parameters as vLLM does; if blocks do not fit, scales get one row for each row of the weight.

    Args:
        create: vLLM's method.
        block: rows of a block; 0 for none.
        name: name of the scales.
        layer: this and the rest are vLLM's arguments.

    Raises:
        ValueError: ranks divide a block's rows.
    """
    parts = list(output_partition_sizes)
    if reason := blocks.indivisible(input_size_per_partition, input_size, block) if block else "":
        raise refused(f"{reason} ({getattr(layer, 'prefix', '')})")
    # vLLM checks that blocks fit, because its own loader counts them from the first row.
    layer.allow_fp8_block_shape_mismatch = True
    create(
        layer=layer,
        input_size_per_partition=input_size_per_partition,
        output_partition_sizes=parts,
        input_size=input_size,
        output_size=output_size,
        params_dtype=params_dtype,
        **named,
    )
    if not block or blocks.are_whole(parts, block, divided=sum(parts) != output_size):
        return
    scales = torch.full((sum(parts), getattr(layer, name).shape[1]), orders.UNSET)
    loader = blocks.loads_rows(named["weight_loader"], block)
    parameter = GroupQuantScaleParameter(data=scales, input_dim=1, output_dim=0, weight_loader=loader)
    layer.register_parameter(name, parameter)

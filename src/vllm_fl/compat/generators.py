"""The V1 runner's random numbers for chunked prompts, on devices with generators without a position.

The runner draws a token after every chunk, and drops all but the last. To undo a draw it moves the request's generator
back by four numbers, as counted on NVIDIA GPUs. PyTorch's CPU generator has no such position and raises an error that
would end the engine. Here the generator's whole state is saved before such a draw, and restored after it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from fl_dispatch.devices import DeviceSpec


def rewind(runner: Any, device: DeviceSpec) -> None:
    """Undo draws of chunks through the generator's state, in a V1 runner. Idempotent.

    Args:
        runner: vLLM's ``GPUModelRunner``, or a subclass.
        device: the runner's device.
    """
    if "_sample" in vars(runner) or _has_positions(device.torch_type):
        return
    sample, book = runner._sample, runner._bookkeeping_sync

    @wraps(sample)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        kept = {row: generator.get_state() for row, generator in _dropped(runner).items()}
        result = sample(*args, **kwargs)
        for row, state in kept.items():
            runner.input_batch.generators[row].set_state(state)
        return result

    @wraps(book)
    def booked(*args: Any, **kwargs: Any) -> Any:
        generators, rewound = runner.input_batch.generators, _dropped(runner)
        for row in rewound:
            del generators[row]  # otherwise the runner would move them
        try:
            return book(*args, **kwargs)
        finally:
            generators.update(rewound)

    runner._sample, runner._bookkeeping_sync = drawn, booked


def _has_positions(torch_type: str) -> bool:
    """Whether generators of a device count the numbers that they drew."""
    try:
        torch.Generator(torch_type).get_offset()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _dropped(runner: Any) -> dict[int, Any]:
    """Return row → generator of each request with a dropped token in this step."""
    generators, mask = runner.input_batch.generators, runner.discard_request_mask.np
    return {row: generator for row, generator in generators.items() if mask[row]} if generators else {}

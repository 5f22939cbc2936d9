"""Work on the device in parallel to the calls under test, which exposes results that depend on timing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from ..devices import device_of

SIZE = 256
"""Rows and columns of the multiplied matrices: small products mean many launches."""
PAUSE_SECONDS = 2e-3
"""Seconds between products, so that the load is uneven and leaves most of a processor to the calls."""


@contextlib.contextmanager
def load(device: torch.device) -> Iterator[None]:
    """Multiply matrices on the device in another thread and its own stream, if any, while this block runs."""
    done = threading.Event()
    spec = device_of(device.type)
    module = spec.module()
    own = module.Stream(device=device) if spec.accelerator and hasattr(module, "Stream") else None

    def work() -> None:
        with module.stream(own) if own is not None else contextlib.nullcontext():
            factor = torch.ones(SIZE, SIZE, device=device)
            while not done.wait(PAUSE_SECONDS):
                factor @ factor

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()

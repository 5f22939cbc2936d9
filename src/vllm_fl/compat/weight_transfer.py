"""Our backends of vLLM's weight transfer, offered to its factories by name."""

from __future__ import annotations

import importlib
from typing import Any

FACTORY = "vllm.distributed.weight_transfer.factory"
MODULE = "vllm_fl.weight_transfer"
ENGINES = {
    "fl_shm": ("SharedMemoryEngine", "SharedMemoryTrainer"),
    "fl_gloo": ("GlooEngine", "GlooTrainer"),
}
"""Backend → the worker's class and the trainer's, which a factory loads when it is asked for them."""


def offer() -> None:
    """Register the backends. Idempotent. vLLM 0.26 has no factory for trainers, and nothing is offered there."""
    factory: Any = importlib.import_module(FACTORY)
    trainers = getattr(factory, "WeightTransferTrainerFactory", None)
    if trainers is None:
        return
    for backend, classes in ENGINES.items():
        for register, name in zip((factory.WeightTransferEngineFactory, trainers), classes, strict=True):
            if backend not in register._registry:
                register.register_engine(backend, MODULE, name)

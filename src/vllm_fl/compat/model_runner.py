"""Which of vLLM's two model runners a device without a Triton driver gets: V1, because V2 is written in Triton."""

from __future__ import annotations

import importlib
from typing import Any

CONFIG = "vllm.config.vllm"


def do_without_triton() -> None:
    """Let vLLM's configuration know that there is no Triton here, so that it takes the V1 runner by itself. Idempotent.

    vLLM asks whether Triton is installed and finds a driver; on a machine with a GPU it does, whatever device we serve.
    Every process that holds a configuration asks, so every one is told. A variable in the environment would reach them
    as well, but vLLM takes ``VLLM_USE_V2_MODEL_RUNNER`` for the user's word, in later configurations too.
    """
    module: Any = importlib.import_module(CONFIG)
    module.HAS_TRITON = False

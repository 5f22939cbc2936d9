"""Kinds of errors of calls: what an exception says about the arguments, the memory and the device."""

from __future__ import annotations

import torch

from ..devices import CUDA, detect_device
from ..errors import NotSupported, text_of
from ..logger_manager import get_logger

logger = get_logger(__name__)

_DEAD_DEVICE = (  # errors after which every call on the device fails
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "misaligned address",
    "invalid address space",
    "invalid program counter",
    "illegal instruction",
    "hardware stack error",
    "uncorrectable ecc error",
    "context is destroyed",
)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")
_TORCH_DISPATCHER = ("Could not run '", "The operator '", "There were no tensor arguments")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, once; an exception that cannot be changed stays without it."""
    try:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    except Exception as refused:  # a frozen exception class
        logger.debug("%s; not added: %s", note, text_of(refused))


def declines(error: BaseException) -> bool:
    """Whether an exception says "not for these arguments": a ``NotImplementedError`` that is not torch's own."""
    if not isinstance(error, NotImplementedError):
        return False
    return isinstance(error, NotSupported) or not text_of(error).partition(": ")[2].startswith(_TORCH_DISPATCHER)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, which the caller must handle (Triton's ``OutOfResources`` is another error)."""
    return any(
        isinstance(part, torch.OutOfMemoryError | MemoryError)
        or (isinstance(part, RuntimeError) and any(sign in text_of(part).lower() for sign in _OUT_OF_MEMORY))
        for part in _parts(error)
    )


def is_dead_device(error: BaseException) -> bool:
    """Whether the error kills the device context, so that any retry fails or gives wrong results."""
    return any(
        isinstance(part, RuntimeError) and any(sign in text_of(part).lower() for sign in _DEAD_DEVICE)
        for part in _parts(error)
    )


def is_capturing() -> bool:
    """Whether a graph is being captured in this thread's stream, of this machine's device or of a CUDA device.

    A device that fails to answer counts as capturing: then no call falls back, and the caller gets the original error.
    """
    try:
        return detect_device().captures() or CUDA.captures()
    except Exception:  # a vendor's code, called while another failure is handled
        logger.warning("the device cannot say whether a graph is being captured", exc_info=True)
        return True


def _parts(error: BaseException) -> list[BaseException]:
    """Return the exception, the exceptions of its group, and their causes."""
    parts: list[BaseException] = [error]
    for part in parts:
        inner = list(part.exceptions) if isinstance(part, BaseExceptionGroup) else []
        if part.__cause__ is not None:
            inner.append(part.__cause__)
        parts += [other for other in inner if not any(other is known for known in parts)]
    return parts

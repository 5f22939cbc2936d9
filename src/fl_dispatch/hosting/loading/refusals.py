"""The errors that refuse a checkpoint, with the problem, the file, and the remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ...logger_manager import get_logger
from ...settings import get_settings
from ..quantized.remedies import OUT_OF_ORDER
from .account import Account
from .allowed import COLUMNS, Allowed, ignored, predictors

logger = get_logger(__name__)

UNUSED = "VLLM_FL_UNUSED_TENSORS"
"""The variable of the setting that excuses tensors."""
CONFIGURED = "compare config.json with the files"
"""Advice if a checkpoint's configuration and files disagree."""
QUANTIZED = (
    f"{CONFIGURED}, and its quantization_config, if there is one, with this layer (targets, ignore, dynamic, "
    "modules_to_not_convert)"
)
"""Advice if the configuration or the files are quantized."""


class CheckpointError(ValueError):
    """A checkpoint does not fit the model that a host made for it."""


def refuse_unfilled(account: Account, model: nn.Module, allowed: Sequence[Allowed]) -> None:
    """Raise :class:`CheckpointError` for casts between kinds of numbers, and for parameters that are not filled."""
    for cast in account.casts:
        if re.fullmatch(r".*\bweight_shape", cast.name):
            continue  # its numbers give the count of packed ones, and hosts do not read them
        raise CheckpointError(
            f"{_tensor(account, cast.name)} has numbers of {_words(cast.stored)}, and the model would read them as "
            f"{_words(cast.dtype)} (parameter '{cast.parameter}'): {_advice(account)}"
        )
    if not (found := account.unfilled(model, allowed)):
        return
    (name, names), *more = found
    layer, _, parameter = name.rpartition(".")
    others = f" (and so of {_count(more, 'parameter')}, such as '{more[-1].name}')" if more else ""
    if names:
        said = f"only a part of '{parameter}' of the layer '{layer}' is in {account.source}, by {_list(names)}{others}"
    else:
        said = f"{account.source} has no tensor for '{parameter}' of the layer '{layer}'{others}"
    left, above = account.left(()), layer.rpartition(".")[0] + "."
    if name in left:
        raise CheckpointError(
            f"the host's class of this model drops {_tensor(account, name)}, so '{parameter}' of the layer '{layer}' "
            f"would be whatever lies in memory{others}: this host cannot serve the checkpoint"
        )
    beside = [other for other in left if other.startswith(above)] if above != "." else []
    if beside:
        exact = [other for other in beside if other.startswith(f"{layer}.")] or beside
        raise CheckpointError(
            f"{said}; it has {_tensor(account, exact[0])}, which the model has no place for: {_advice(account)}"
        )
    raise CheckpointError(f"{said}: the files are not complete, or not of the model that config.json describes")


def left_over(account: Account, untaken: Sequence[Allowed], model_config: Any) -> list[str]:
    """Return the tensors that no parameter of this rank took, and that neither host nor Transformers ignores.

    Args:
        untaken: the host's rules for tensors that its models may ignore.
        model_config: a host's ``ModelConfig``.
    """
    known = (*untaken, *predictors(model_config.hf_text_config))
    left = account.left(known)
    return left and account.left((*known, *ignored(model_config.hf_config)))  # asking Transformers takes time


def refuse_left(account: Account, left: Sequence[str]) -> None:
    """Raise :class:`CheckpointError` if there are tensors that no rank used and no setting excuses."""
    excused = get_settings().unused_tensors
    if named := [name for name in left if any(fnmatchcase(name, pattern) for pattern in excused)]:
        logger.warning(
            "%d tensors of %s are left unused, such as '%s', because %s names them",
            len(named), account.source, named[0], UNUSED,
        )  # fmt: skip
        left = [name for name in left if name not in set(named)]
    if moved := [name for name in left if name.endswith(COLUMNS)]:
        raise CheckpointError(f"{_tensor(account, moved[0])} {OUT_OF_ORDER}")
    if left:
        more = f" (nor of {_count(left[1:], 'tensor')}, such as '{left[-1]}')" if len(left) > 1 else ""
        raise CheckpointError(
            f"nothing in the model made use of {_tensor(account, left[0])}{more}: the answers would be those of "
            f"another network; {_advice(account)}, or name it in {UNUSED} if the answers are right without it"
        )


@contextmanager
def naming(account: Account) -> Iterator[None]:
    """Add the tensor and its file to errors that a host's loader raises in the block."""
    try:
        yield
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if account.last is None or isinstance(error, torch.OutOfMemoryError) or _is_ours(error):
            raise
        dtype, sizes = account.tensors[account.last]
        raise CheckpointError(
            f"{_tensor(account, account.last)} ({_words(dtype)}, {'×'.join(map(str, sizes))}) cannot be loaded "
            f"({type(error).__name__}: {str(error) or 'without a message'}): {_advice(account)}"
        ) from error


def _tensor(account: Account, name: str) -> str:
    return f"'{name}' of {account.file_of(name) or account.source}"


def _advice(account: Account) -> str:
    return QUANTIZED if account.is_quantized() else CONFIGURED


def _is_ours(error: BaseException) -> bool:
    """Whether a plugin of this project raised an error, so that its text is already a sentence."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("fl_dispatch", "vllm_fl", "sglang_fl")


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(rest: Sequence[object], noun: str) -> str:
    return f"{len(rest)} more {noun}{'s' if len(rest) > 1 else ''}"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"

"""The hot path: a call reads the current table, runs its entry, and hands an exception to the table's owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..run.keys import LAYER_KEYS, key_of
from ..run.layer_form import may_be_layer
from ..run.recovery import recover
from ..run.table import DispatchTable
from ..selection.decision import Decision
from ..state import unknown
from .process import ROOT, get_default_manager

_Tensor = torch.Tensor
_is_compiling = torch.compiler.is_dynamo_compiling
_KNOWN_LAYERS = 256  # some libraries make a class for every module
_layers: set[type] = set()  # classes of first arguments that are not tensors; asking at each call would double its cost


def call_op(op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run an operator through the best implementation that the policy in force allows.

    Args:
        op_name: the operator.
        args, kwargs: its arguments, tensors first (``call_op("rms_norm", x, residual, weight, epsilon)``) or with a
            layer first (``call_op("rms_norm", layer, x, residual)``). Positional arguments are faster.

    Returns:
        The implementation's result.

    Raises:
        NoImplementationError: no implementation is allowed, available and fit for the arguments.
        Exception: the implementation's error, if no other implementation could take over.

    >>> import torch
    >>> call_op("silu_and_mul", torch.zeros(1, 4))
    tensor([[0., 0.]])
    """
    table = ROOT
    if not table.plain:
        if table.stale:
            table.start()
        table = table.current
    try:
        kind = args[0].__class__
        if kind is _Tensor:
            fn = table.entries[op_name]
        elif not _is_compiling() and kind in _layers:  # each added class would invalidate the trace
            fn = table.entries[LAYER_KEYS.get(op_name, op_name)]
        else:
            fn = _entry_for(table, op_name, args[0])
    except (KeyError, IndexError):
        if args or op_name not in table.entries:
            raise unknown(op_name) from None
        fn = table.entries[op_name]
    try:
        if kwargs:
            return fn(*args, **kwargs)
        return fn(*args)
    except Exception as error:
        failure = error
    try:
        return recover(key_of(op_name, args), table, fn, failure, args, kwargs)
    finally:
        del failure  # the traceback holds this frame, and with it the arguments


def _entry_for(table: DispatchTable, op_name: str, first: Any) -> Callable[..., Any]:
    """Return the entry for a first argument that is not a plain tensor: a layer, or a tensor subclass."""
    if op_name not in LAYER_KEYS or not may_be_layer(first):
        return table.entries[op_name]
    if not _is_compiling() and len(_layers) < _KNOWN_LAYERS:
        _layers.add(first.__class__)
    return table.entries[LAYER_KEYS[op_name]]


def resolve_op(op_name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the implementation that :func:`call_op` would run; see :meth:`fl_dispatch.manager.OpManager.resolve`."""
    return get_default_manager().resolve(op_name, *args, **kwargs)


def bind_op(op_name: str, scope: str | None = None) -> Callable[..., Any]:
    """Return a function with the operator's signature that dispatches at every call, at the lowest cost.

    Args:
        op_name: the operator.
        scope: the layer's name, such as ``model.layers.3.input_layernorm``; policies and bans can name it.

    >>> import torch
    >>> bind_op("silu_and_mul")(torch.zeros(1, 4))
    tensor([[0., 0.]])
    """
    return get_default_manager().bind(op_name, scope)


def explain(op_name: str, *args: Any, scope: str | None = None, **kwargs: Any) -> Decision:
    """Explain which implementation of an operator runs, and why; see :meth:`fl_dispatch.manager.OpManager.explain`."""
    return get_default_manager().explain(op_name, *args, scope=scope, **kwargs)

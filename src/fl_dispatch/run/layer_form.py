"""The layer form: a layer replaces the arguments that it holds, for callers and for implementations.

The declaration maps the layer's attributes to parameters (:class:`~fl_dispatch.ops.LayerForm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ops import Operator

_NO_LAYER = (torch.Tensor, bool, int, float, complex, str, bytes, list, tuple, dict)


class LayerStandIn:
    """The layer that an implementation receives when the caller passed tensors."""

    __slots__ = ("__dict__",)

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.__dict__.update(attributes)


def may_be_layer(value: Any) -> bool:
    """Whether a value can be a layer: not a tensor, and not an object that callers pass for a tensor by mistake."""
    return value is not None and not isinstance(value, _NO_LAYER) and type(value).__module__ != "numpy"


def is_layer_first(operator: Operator, args: tuple[Any, ...]) -> bool:
    """Whether a call's first argument is a layer."""
    return operator.layer is not None and bool(args) and may_be_layer(args[0])


def attributes_of(operator: Operator) -> Mapping[str, str]:
    """Return the parameters that a layer supplies → its attributes; empty if the operator has no layer form."""
    return operator.layer.attributes if operator.layer else {}


def passed_by(operator: Operator) -> list[str]:
    """Return the declared parameters that a layer-first call passes itself, in order."""
    attributes = attributes_of(operator)
    return [name for name in operator.parameters if name not in attributes]


def read_from(operator: Operator, layer: Any) -> dict[str, Any]:
    """Return the arguments that a layer supplies, by name; a missing attribute leaves the parameter at its default."""
    attributes = attributes_of(operator).items()
    return {name: getattr(layer, attribute) for name, attribute in attributes if hasattr(layer, attribute)}


def stand_in(operator: Operator, values: Mapping[str, Any]) -> LayerStandIn:
    """Make a layer for an implementation that takes one, from the operator's arguments by name."""
    return LayerStandIn({attribute: values[name] for name, attribute in attributes_of(operator).items()})


def arguments_of(operator: Operator, layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operator's arguments by name, for a call with a layer as its first argument.

    Raises:
        TypeError: the call does not fit the layer form.
    """
    refuse_a_stranger(operator, layer)
    names = passed_by(operator)
    if len(args) > len(names):
        raise TypeError(
            f"{operator.name}(obj, {', '.join(names)}) takes {len(names)} arguments after the layer, not {len(args)}"
        )
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names or name in given:
            raise TypeError(f"{operator.name}: argument '{name}' is unknown, doubled, or the layer's own")
        given[name] = value
    return given | read_from(operator, layer)


def refuse_a_stranger(operator: Operator, layer: Any) -> None:
    """Refuse an object that holds none of the operator's arguments, because it is no layer of this operator.

    Raises:
        TypeError: the object holds none of them.
    """
    attributes = attributes_of(operator).values()
    if attributes and not any(hasattr(layer, attribute) for attribute in attributes):
        raise TypeError(
            f"{operator.name}: a layer with one of the attributes {', '.join(attributes)} is needed, and the first "
            f"argument, of the class {type(layer).__name__}, has none of them"
        )

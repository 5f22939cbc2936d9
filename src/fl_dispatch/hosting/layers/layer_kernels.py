"""Our product of a host's layer: an object attached to the layer, which the layer calls with its parameters.

All else stays the host's: loading and dividing weights, gathering, summing over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from ... import bind_op
from .attribute import Attached


class LayerKernel:
    """The operators of one layer, bound for its prefix."""

    fl_operator: str
    fl_weights: tuple[str, ...]
    """The layer's parameters that stay from call to call, so that implementations may prepare them."""
    fl_traced = True
    """Whether compiled code of a host contains the call."""
    fl_call: Callable[..., Tensor]
    fl_scope: str | None

    def __init__(self) -> None:
        self.fl_bind(None)

    def fl_bind(self, scope: str | None) -> None:
        """Bind the operators for the layer with this prefix; ``None`` while it is not known."""
        self.fl_scope, self.fl_call = scope, bind_op(self.fl_operator, scope)

    def fl_name(self, layer: nn.Module) -> str:
        """Return the layer's name in reports."""
        return type(self).__name__


KERNEL = Attached[LayerKernel]("fl_kernel")
"""Our kernel that computes a layer."""


def kernels(model: nn.Module) -> Iterator[tuple[str, nn.Module, LayerKernel]]:
    """Yield each layer of a model that one of our kernels computes: prefix, layer and kernel."""
    for prefix, module in model.named_modules():
        if (kernel := KERNEL.find(module)) is not None:
            yield prefix, module, kernel


def weights(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield these layers with the names of the parameters that stay from call to call."""
    for _, layer, kernel in kernels(model):
        yield from ((layer, name) for name in kernel.fl_weights if getattr(layer, name, None) is not None)

"""A bridge: one layer of SGLang with one of our operators as its forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from fl_dispatch.hosting.layers.bound_layer import BoundLayer
from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)

fallen_through: Counter[tuple[str, str]] = Counter()
"""(class, reason) → calls that SGLang's own code ran because no operator takes them."""


class Bridge(BoundLayer):
    """A forward that a layer calls instead of its own; it has the same parameters.

    Args:
        layer: SGLang's layer. Its weights are read at each call, because SGLang may replace them.
        native: SGLang's forward.
        scope: the layer's prefix in the model, or ``None`` while it is unknown.

    Raises:
        Unbridged: this instance computes something that no operator does, and SGLang's own code is right.
        ValueError: no operator computes it, and SGLang's own code would silently omit it.
    """

    def __init__(self, layer: nn.Module, native: Callable[..., Any], scope: str | None = None) -> None:
        self.layer: Any = layer
        self.native = native
        self.fl_bind(scope)

    def place(self, model: nn.Module, prefix: str) -> None:
        """Receive the model when it is loaded; the layer is its submodule ``prefix``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward, with SGLang's parameters."""
        raise NotImplementedError

    def fall_through(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Run SGLang's own code for a call that no operator takes; log it once, and always count it."""
        key = (type(self.layer).__name__, reason)
        if not fallen_through[key]:
            logger.warning("%s: SGLang's own code runs %s", *key)
        fallen_through[key] += 1
        return self.native(*args, **kwargs)


class Unbridged(Exception):  # noqa: N818  an outcome, not an error
    """A layer stays SGLang's; the message says why."""

"""vLLM's linear layers over the operator ``linear``.

Only products with plain weights are ours: a layer keeps its other work (loading and dividing weights, gathering,
summing over ranks), and calls its ``quant_method`` for the product. That object stays vLLM's, too, because vLLM and
LoRA check its class; its ``apply`` becomes a call of the operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fl_dispatch import bind_op, get_policy, weight_forms
from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.layers import layer_kernels
from fl_dispatch.hosting.memory import paging

from ..compat import layer_classes
from .forwards import DispatchedLayer
from .mixture import ExpertsLayer


def apply(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product that ``UnquantizedLinearMethod.apply`` computes."""
    result: Tensor = layer.fl_call(x, layer.weight, bias)
    return result


class ActsAsHostClass(type):
    """Metaclass of a replacement class that accepts vLLM's own class and its subclasses as subclasses.

    vLLM calls ``isinstance`` with the replacement class to find the layers that LoRA can wrap; vLLM's subclasses are
    not replaced, and would be missed.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        *_, vllms = cls.__bases__
        return isinstance(instance, vllms)


class LinearLayer(DispatchedLayer):
    """A layer with a product that our operator may compute."""

    fl_operator = "linear"
    fl_metaclass = ActsAsHostClass
    quant_method: Any
    weight: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if layer_classes.multiplies_plainly(self.quant_method):
            self.quant_method.apply = apply

    def fl_runs(self) -> bool:
        """Whether the product is ours; for example not if weights are quantized."""
        return getattr(self.quant_method, "apply", None) is apply


class HeadLayer(LinearLayer):
    """The layer that makes logits, ``ParallelLMHead``; ``UnquantizedEmbeddingMethod`` computes its product.

    The product is ours on CPUs, and if the policy asks for batch invariance: our kernels were not measured at the width
    of a vocabulary on other devices.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if detect_device().accelerator and not get_policy().batch_invariant:
            vars(self.quant_method).pop("apply", None)


class Weights:
    """The weights of a model's products and experts, declared as tensors that stay (:mod:`fl_dispatch.weight_forms`).

    Args:
        model: the loaded model with bound layers.
        compiled: whether compiled code will run it.
        captured: whether graphs will run it.
    """

    def __init__(self, model: nn.Module, compiled: bool, captured: bool = False) -> None:
        self._held = compiled or captured
        found = [layer for layer in _products(model) if isinstance(layer.weight, Tensor)]
        named = [*((layer, "weight") for layer in found), *layer_kernels.weights(model), *_experts(model)]
        self.declared = [(layer, name, weight_forms.declare(getattr(layer, name))) for layer, name in named]
        self._places = [(vars(layer)["_parameters"], name, forms) for layer, name, forms in self.declared]

    def settled(self) -> AbstractContextManager[None]:
        """Return the context of a step: written or replaced weights are prepared before it, and none inside it.

        Compiled code uses the existing forms, and removes marks from weights that it reads.
        """
        found = [(own, forms) for place, name, forms in self._places if (own := place.get(name)) is not None]
        return weight_forms.settled(found, self._held)

    def page_out(self, folder: Path) -> None:
        """Move the memory of weights that products use in a packed form to a disk."""
        with self.settled():  # what was written is packed first
            pass
        found = [own for place, name, _ in self._places if (own := place.get(name)) is not None]
        paging.page_out(found, folder)

    def try_heads(self) -> None:
        """Multiply once with weights that no dummy batch reaches, to prepare them before the first request."""
        for layer, *_ in self.declared:
            if isinstance(layer, HeadLayer) and layer.fl_runs():
                weight = _own(layer, "weight")
                assert weight is not None
                layer.quant_method.apply(layer, weight.new_zeros(1, weight.shape[1]))


def _own(module: Any, name: str) -> Tensor | None:
    """Return a parameter of the module itself."""
    found: Tensor | None = vars(module)["_parameters"].get(name)
    return found


def multiply_with_embeddings(model: nn.Module) -> None:
    """Make embeddings that also make logits, as in tied models, multiply with the operator.

    This applies if the policy asks for batch invariance; otherwise the product is PyTorch's own.
    """
    if not get_policy().batch_invariant:
        return
    call = bind_op("linear")
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "embedding") and layer_classes.multiplies_plainly(method) and method.apply is not apply:
            method.apply = lambda layer, x, bias=None: call(x, layer.weight, bias)


def _experts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the layers of experts that are ours, each with the names of its weights."""
    for layer in model.modules():
        if isinstance(method := getattr(layer, "quant_method", None), ExpertsLayer):
            yield from ((layer, name) for name in method.fl_weights if _own(layer, name) is not None)


def _products(model: nn.Module) -> Iterator[Any]:
    return (layer for layer in model.modules() if isinstance(layer, LinearLayer) and layer.fl_runs())

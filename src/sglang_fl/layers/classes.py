"""Install bridges where SGLang's layers ask for a forward, and bind them to prefixes after loading.

Each SGLang layer calls the hook :func:`resolve` once. After the model is loaded every layer is prepared with its prefix
as scope.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from fl_dispatch import weight_forms
from fl_dispatch.hosting.layers.attribute import Attached
from fl_dispatch.hosting.layers.bound_layer import bind_for
from fl_dispatch.hosting.layers.layer_kernels import KERNEL, weights
from fl_dispatch.hosting.layers.scopes import prefixes_of
from fl_dispatch.hosting.layers.survey import LayerChoice, Survey, count, warn_of_unknown_layers
from fl_dispatch.hosting.start.first_choices import warn_of_waiting
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import Settings, get_settings

from ..attention import attention_layers
from ..bridge import ROWS, Bridge, Unbridged, find, linear
from ..bridge.mixture import MIXTURE
from ..bridge.states import StateBridge
from ..compat import backend_choice
from ..quantization import latent

logger = get_logger(__name__)


# -- one layer --------------------------------------------------------------------------------------------------------


def resolve(original: Callable[[BaseFusedOp], Callable[..., Any]], layer: BaseFusedOp) -> Callable[..., Any]:
    """Return the forward of a layer that asks SGLang for it: our bridge's, or SGLang's own."""
    native = original(layer)
    row = find(type(layer))
    bridge = None if row is None or row.own_forward else _bridge(layer, native)
    return native if bridge is None else bridge.forward


BRIDGE = Attached[Bridge]("fl_bridge")
"""The bridge of a layer that runs our operator."""
KEPT = Attached[str]("fl_kept")
"""Why a layer that asked for a bridge has none."""


def _bridge(layer: nn.Module, native: Callable[..., Any]) -> Bridge | None:
    """Return the layer's bridge, made at the first question; ``None`` if SGLang's own code runs."""
    if (present := BRIDGE.find(layer)) is not None:
        return present
    row = find(type(layer))
    names, settings = (type(layer).__name__, row.name) if row else (), get_settings()
    if row is None:
        return None
    if not any(settings.registers(*names, operator) for operator in row.bridge.fl_operators()):
        KEPT.give(layer, linear.UNREGISTERED)
        return None
    try:
        bridge = row.bridge(layer, native)
    except Unbridged as reason:
        _say_unbridged(type(layer).__name__, str(reason))
        KEPT.give(layer, str(reason))
        return None
    if not settings.registers(*names, bridge.fl_operator):
        KEPT.give(layer, linear.UNREGISTERED)
        return None
    BRIDGE.give(layer, bridge)
    return bridge


def _installed(layer: Any) -> Bridge | None:
    """Install and return the bridge of a layer; ``None`` if SGLang's own code runs."""
    row = find(type(layer))
    assert row is not None
    if row.own_forward:  # this layer never asks SGLang
        bridge = _bridge(layer, layer.forward)
        if bridge is not None:
            vars(layer)["forward"] = bridge.forward
        return bridge
    if layer._forward_method is None:  # otherwise its constructor has pinned SGLang's own code, or it was called before
        layer._forward_method = layer._resolve_forward_method()
    bridge = BRIDGE.find(layer)
    if bridge is not None:
        backend_choice.keep(layer, bridge.forward)
    return bridge


def _choice(layer: Any, bridge: Bridge | None, unused: str | None) -> LayerChoice:
    """Return SGLang's choice for one layer with ours; ``unused`` is why the model never calls the layer."""
    name, row = type(layer).__name__, find(type(layer))
    assert row is not None
    if bridge is not None:
        return LayerChoice(name, 1, (bridge.fl_operator,), backend_choice.name_of(bridge.native))
    if unused is not None:
        return LayerChoice(name, 1, row.bridge.fl_operators(), "never called", unused)
    chosen = layer.forward if row.own_forward else layer._forward_method
    kept = KEPT.find(layer) or "its constructor has pinned it"
    return LayerChoice(name, 1, row.bridge.fl_operators(), backend_choice.name_of(chosen), kept)


@cache
def _say_unbridged(name: str, reason: str) -> None:
    logger.warning("%s stays with SGLang's own code: %s", name, reason)


# -- a loaded model ---------------------------------------------------------------------------------------------------

UNUSED = {("Gemma3Attention", "rotary_emb"): "Gemma 3 rotates with tables of its own"}
"""Layers that a model has but never calls, and why: class of the module above, name → reason."""


def _unused(model: nn.Module, prefix: str) -> str | None:
    above, _, name = prefix.rpartition(".")
    return UNUSED.get((type(model.get_submodule(above)).__name__, name))


def is_called(model: nn.Module, prefix: str) -> bool:
    """Whether the model calls a layer that it has."""
    return _unused(model, prefix) is None


def _named_layers(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield every bridged class and attention layer, with all its prefixes, because layers may share a module."""
    named = prefixes_of(model).items()
    found = {one: prefixes for one, prefixes in named if isinstance(one, RadixAttention) or find(type(one)) is not None}
    for prefix, layer in attention_layers.transformers_layers(model):
        found.setdefault(layer, []).append(prefix)
    yield from found.items()


def prepare(model: nn.Module) -> Survey:
    """Bind every layer of a loaded model for its prefix, and count which are ours.

    Raises:
        ValueError: an attention layer cannot be served, or a rule names some of the layers that share a module.
    """
    ours: dict[str, tuple[str, int]] = {}
    native: Counter[str] = Counter()
    attending: Counter[str] = Counter()
    choices: Counter[LayerChoice] = Counter()
    of_states: set[str] = set()
    for module, prefixes in _named_layers(model):
        name = type(module).__name__
        if isinstance(module, RadixAttention):
            if (why := attention_layers.refusal(module)) is not None:
                raise ValueError(f"sglang_fl does not support {why} yet ({prefixes[0]})")
            attention_layers.bind(module, prefixes[0])
            attending[name] += 1
            continue
        reason = _unused(model, prefixes[0])
        if reason is not None:
            _say_unbridged(name, reason)
        bridge = _installed(module) if reason is None else None
        choices[_choice(module, bridge, reason)] += 1
        if bridge is None:
            native[name] += 1
            continue
        bind_for(bridge, [*map(bridge.fl_scope, prefixes)])
        bridge.place(model, prefixes[0])
        of_states.update(bridge.fl_choices if isinstance(bridge, StateBridge) else ())
        count(ours, name, bridge.fl_operator)
    for layer in model.modules():
        if (choice := linear.install(layer)) is not None:
            choices[choice] += 1
    warn_of_waiting(of_states)
    for layer, prefixes in prefixes_of(model).items():
        if (kernel := KERNEL.find(layer)) is not None:
            bind_for(kernel, prefixes)
            if (mixture := MIXTURE.find(layer)) is not None:
                mixture.place(model, prefixes[0])
            count(ours, kernel.fl_name(layer), kernel.fl_operator)
    latent.split(model)
    for layer, parameter in weights(model):
        weight_forms.declare(getattr(layer, parameter))
    said = tuple(replace(choice, count=count) for choice, count in choices.items())
    return Survey("SGLang", ours, dict(native), dict(attending), said)


def warn_of_unknown_names(settings: Settings) -> None:
    """Log each name in the lists of out-of-tree layers that is neither a layer nor an operator of this package."""
    known = {name for row in ROWS for name in (row.name, *row.bridge.fl_operators())}
    warn_of_unknown_layers(settings, {*known, *linear.NAMES, linear.Product.fl_operator})

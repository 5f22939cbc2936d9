"""vLLM's layers over our operators: one mixin a family, one row a class.

vLLM replaces a layer class by its exact name (``CustomOp.register_oot``), so subclasses that inherit the same forward
have rows of their own. Each layer binds its operator once; after loading the worker binds it again, with the layer's
prefix as scope.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.model_executor import custom_op

from fl_dispatch import bind_op
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.policy import get_policy
from fl_dispatch.settings import Settings

logger = get_logger(__name__)


class DispatchedLayer:
    """A layer of vLLM whose forward is one of our operators. First base of every replacement class."""

    fl_operator: ClassVar[str]
    fl_call: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fl_bind(None)

    def fl_bind(self, scope: str | None) -> None:
        """Bind the operator for the layer with this prefix."""
        self.fl_call = bind_op(self.fl_operator, scope)

    def fl_runs(self) -> bool:
        """Whether vLLM really calls our forward: a user can switch single layers off with ``custom_ops``."""
        method = getattr(self, "_forward_method", None)
        return getattr(method, "__func__", None) is type(self).forward_oot  # type: ignore[attr-defined]


class NormLayer(DispatchedLayer):
    """``RMSNorm`` and ``GemmaRMSNorm``: ``forward(x, residual=None)``."""

    has_weight = True
    variance_size_override: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.variance_size_override is not None:  # the mean over a part of the row is not our operator
            self._forward_method = self.forward_native  # type: ignore[attr-defined]

    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        weight = self.weight if self.has_weight else None  # type: ignore[attr-defined]
        return self.fl_call(x, residual, weight, self.variance_epsilon)  # type: ignore[attr-defined]


class RMSNormLayer(NormLayer):
    fl_operator = "rms_norm"


class GemmaRMSNormLayer(NormLayer):
    fl_operator = "gemma_rms_norm"


class SiluAndMulLayer(DispatchedLayer):
    """``SiluAndMul``: ``forward(x)``."""

    fl_operator = "silu_and_mul"

    def forward_oot(self, x: Tensor) -> Tensor:
        return self.fl_call(x)


class GeluAndMulLayer(DispatchedLayer):
    """``GeluAndMul``: ``forward(x)``."""

    fl_operator = "gelu_and_mul"

    def forward_oot(self, x: Tensor) -> Tensor:
        return self.fl_call(x, self.approximate)  # type: ignore[attr-defined]


class RotaryLayer(DispatchedLayer):
    """``RotaryEmbedding`` and its subclasses: ``forward(positions, query, key=None)`` on flattened heads."""

    fl_operator = "rotary_embedding"
    fl_table: tuple[Tensor | None, Tensor, Tensor] = (None, torch.empty(0), torch.empty(0))

    def forward_oot(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        cache = self._match_cos_sin_cache_dtype(query)  # type: ignore[attr-defined]
        if cache is not self.fl_table[0]:  # the table is one tensor [positions, cos | sin]; split it once
            self.fl_table = (cache, *cache.chunk(2, dim=-1))
        _, cos, sin = self.fl_table
        positions = positions.flatten()
        heads = (positions.shape[0], -1, self.head_size)  # type: ignore[attr-defined]
        rotated, rotated_key = self.fl_call(
            query.view(heads),
            None if key is None else key.view(heads),
            cos,
            sin,
            positions,
            not self.is_neox_style,  # type: ignore[attr-defined]
        )
        return rotated.reshape(query.shape), None if key is None else rotated_key.reshape(key.shape)


@dataclass(frozen=True)
class LayerClass:
    """One class of vLLM that is replaced: its module, its name, and the mixin with our forward."""

    module: str
    name: str
    mixin: type[DispatchedLayer]

    @property
    def operator(self) -> str:
        """The operator that it runs."""
        return self.mixin.fl_operator

    def in_tree(self) -> type | None:
        """vLLM's class, or ``None`` in a version that does not have it."""
        try:
            return getattr(importlib.import_module(self.module), self.name, None)
        except ModuleNotFoundError:
            return None

    def wanted(self, settings: Settings) -> bool:
        """Whether the user wants it replaced; lists name classes or operators."""
        return settings.registers(self.name, self.operator)


_LAYERS = "vllm.model_executor.layers"
_ROPE = f"{_LAYERS}.rotary_embedding"

LAYER_CLASSES = (
    LayerClass(f"{_LAYERS}.layernorm", "RMSNorm", RMSNormLayer),
    LayerClass(f"{_LAYERS}.layernorm", "GemmaRMSNorm", GemmaRMSNormLayer),
    LayerClass(f"{_LAYERS}.activation", "SiluAndMul", SiluAndMulLayer),
    LayerClass(f"{_LAYERS}.activation", "GeluAndMul", GeluAndMulLayer),
    LayerClass(f"{_ROPE}.base", "RotaryEmbedding", RotaryLayer),
    LayerClass(f"{_ROPE}.llama3_rope", "Llama3RotaryEmbedding", RotaryLayer),
    LayerClass(f"{_ROPE}.linear_scaling_rope", "LinearScalingRotaryEmbedding", RotaryLayer),
    LayerClass(f"{_ROPE}.ntk_scaling_rope", "NTKScalingRotaryEmbedding", RotaryLayer),
    LayerClass(f"{_ROPE}.dynamic_ntk_scaling_rope", "DynamicNTKScalingRotaryEmbedding", RotaryLayer),
    LayerClass(f"{_ROPE}.dynamic_ntk_alpha_rope", "DynamicNTKAlphaRotaryEmbedding", RotaryLayer),
    LayerClass(f"{_ROPE}.yarn_scaling_rope", "YaRNScalingRotaryEmbedding", RotaryLayer),
    LayerClass(f"{_ROPE}.gemma4_rope", "Gemma4RotaryEmbedding", RotaryLayer),
)
"""FourierRotaryEmbedding and the multimodal ones have a forward of their own and stay vLLM's."""


def register(settings: Settings) -> None:
    """Register the wanted classes with vLLM and take back the unwanted ones. Idempotent."""
    registered = custom_op.op_registry_oot
    known = {name for row in LAYER_CLASSES for name in (row.name, row.operator)}
    for listed in sorted({*(settings.oot_whitelist or ()), *settings.oot_blacklist} - known):
        logger.warning(
            "'%s' in the lists of out-of-tree layers has no effect: no layer of that name is replaced", listed
        )
    for row in LAYER_CLASSES:
        present = registered.get(row.name)
        ours = present is not None and issubclass(present, DispatchedLayer)
        if present is not None and not ours:
            if row.wanted(settings):
                logger.warning("%s stays with %s, which another plugin registered", row.name, present.__qualname__)
        elif ours and not row.wanted(settings):
            del registered[row.name]
        elif not ours and row.wanted(settings) and (base := row.in_tree()) is not None:
            replacement = type(f"{row.name}FL", (row.mixin, base), {"__module__": __name__})
            custom_op.CustomOp.register_oot(name=row.name)(replacement)


@dataclass(frozen=True)
class Survey:
    """Which layers of a loaded model are ours.

    Args:
        ours: class name → (operator, how many).
        native: class name → how many; layers that we have an operator for but vLLM's own code runs.
        attention: attention class name → how many layers.
    """

    ours: dict[str, tuple[str, int]]
    native: dict[str, int]
    attention: dict[str, int]

    def describe(self) -> str:
        """One line for the log."""
        ours = ", ".join(f"{name} {count} ({op})" for name, (op, count) in self.ours.items()) or "none"
        native = ", ".join(f"{name} {count}" for name, count in self.native.items()) or "none"
        attention = ", ".join(f"{name} {count}" for name, count in self.attention.items()) or "none"
        return f"layers through fl_dispatch: {ours}; attention: {attention}; left to vLLM's own code: {native}"

    def refuse_native_run(self, settings: Settings) -> None:
        """Raise ``RuntimeError`` if nothing is ours although something could be: it must not go unnoticed."""
        if settings.enabled and settings.oot_enabled and self.native and not self.ours:
            raise RuntimeError(
                f"no layer of this model runs through fl_dispatch, although it has {', '.join(self.native)}: a list or "
                "custom_ops leaves them all out; set VLLM_FL_OOT_ENABLED=0 if that is meant"
            )


def _covered_name(module: nn.Module) -> str | None:
    """The name of the replaced class that a layer is, or inherits from."""
    names = {row.name for row in LAYER_CLASSES}
    return next((base.__name__ for base in type(module).__mro__ if base.__name__ in names), None)


def _attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        if hasattr(module, "impl") and hasattr(module, "attn_backend"):
            yield prefix, module


def bind_scopes(model: nn.Module) -> None:
    """Bind every layer's operators again, now for the layer's prefix.

    Raises:
        ValueError: a rule names one of several layers that share a module, so it cannot be obeyed.
    """
    prefixes: dict[DispatchedLayer, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DispatchedLayer):
            prefixes.setdefault(module, []).append(prefix)
    for module, shared in prefixes.items():
        _refuse_partial_rules(module.fl_operator, shared)
        module.fl_bind(shared[0])
    for prefix, module in _attention_layers(model):
        if hasattr(module.impl, "fl_bind"):
            module.impl.fl_bind(getattr(module, "layer_name", prefix))


def _refuse_partial_rules(op_name: str, shared: list[str]) -> None:
    """vLLM lets layers share modules (one rotary embedding for all, say): a rule holds for all of them or for none."""
    policy = get_policy()
    for name, rules in (("per_op_order", policy.get_per_op_order), ("op_tuned", policy.get_tuned_rules)):
        if len({str(rules(op_name, prefix)) for prefix in shared}) > 1:
            raise ValueError(
                f"{policy.origin(name)}: a rule for '{op_name}' names some of the layers that share one module here "
                f"({', '.join(shared[:3])}, ...: {len(shared)} in all); name all of them, or none"
            )


def survey(model: nn.Module) -> Survey:
    """Count the layers of a loaded model."""
    ours: dict[str, tuple[str, int]] = {}
    native: dict[str, int] = {}
    attention: dict[str, int] = {}
    for module in model.modules():
        name = _covered_name(module)
        if name is None:
            continue
        if isinstance(module, DispatchedLayer) and module.fl_runs():
            ours[name] = (module.fl_operator, ours.get(name, ("", 0))[1] + 1)
        else:
            native[name] = native.get(name, 0) + 1
    for _, module in _attention_layers(model):
        name = type(module.impl).__name__
        attention[name] = attention.get(name, 0) + 1
    return Survey(ours, native, attention)

"""vLLM's layers over our operators: one row per class; the forwards are in :mod:`vllm_fl.layers.forwards`.

vLLM replaces a layer class by its exact name (``CustomOp.register_oot``), so subclasses that inherit the same forward
have separate rows. Each layer binds its operator once; after loading, the worker binds it again with the layer's prefix
as scope.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import Signature, signature
from typing import Any

from torch import nn

from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.facts.fact import HostFact
from fl_dispatch.hosting.layers.bound_layer import Bindable, bind_for
from fl_dispatch.hosting.layers.layer_kernels import KERNEL, kernels
from fl_dispatch.hosting.layers.scopes import prefixes_of
from fl_dispatch.hosting.layers.survey import Survey, count, warn_of_unknown_layers
from fl_dispatch.hosting.start.first_choices import has_kernel
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import Settings

from ..compat import layer_classes
from . import delta_net, encoder_attention, forwards, linear, mamba1, mamba2, mixture, short_conv
from .forwards import DispatchedLayer

logger = get_logger(__name__)


@dataclass(frozen=True)
class LayerClass:
    """One class of vLLM that is replaced.

    Args:
        module, name: its module and name.
        mixin: our forward.
        custom_op: whether it is a ``CustomOp``, which vLLM replaces itself. Otherwise its name is replaced in the
            package above ``module``, where vLLM looks it up (see ``compat.layer_classes``).
        own_kernel: whether it is replaced only if the first choice is not PyTorch's own product, which vLLM's own code
            calls, too.
        transformers: whether it belongs to vLLM's Transformers backend, which is imported only for models that need it.
        cpu_only: whether it is replaced only on CPUs, because our kernels for it were not measured on other devices.
        creates_context: whether importing ``module`` asks Triton for the current device, which creates a context. A
            process with a context cannot be forked, and vLLM forks its engine, so only processes that run models import
            it.
    """

    module: str
    name: str
    mixin: type[DispatchedLayer]
    custom_op: bool = True
    own_kernel: bool = False
    transformers: bool = False
    cpu_only: bool = False
    creates_context: bool = False

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the operator that it runs; several if instances run different ones."""
        return self.mixin.fl_operators()

    @property
    def facts(self) -> tuple[HostFact, ...]:
        """Return the facts that the replacement relies on: the class with its forward, an activation's attributes."""
        if not issubclass(self.mixin, forwards.ActivationLayer):
            return (self._forward,)
        user = self.mixin.__module__.removeprefix("vllm_fl.")
        return self._forward, *self.mixin.fl_activation.facts(f"{self.module}:{self.name}", user)

    @property
    def _forward(self) -> HostFact:
        why = "The layer would run vLLM's own code."
        forward, user = getattr(self.mixin, "forward_oot", None), self.mixin.__module__.removeprefix("vllm_fl.")
        if forward is None or self.transformers:  # vLLM's own forward runs, or the forward of the base's row
            return HostFact(self.module, (self.name,), "replaces", user, why)
        name = "forward_native" if self.custom_op else "forward"
        _, *parameters = (p.replace(annotation=p.empty) for p in signature(forward).parameters.values())
        owner, call = f"{self.module}:{self.name}", f"{name}{Signature(parameters)}"
        return HostFact(owner, (call,), "overrides", user, why)

    def in_tree(self) -> type | None:
        """Return vLLM's class; ``None`` if this version lacks it."""
        try:
            return getattr(importlib.import_module(self.module), self.name, None)
        except ModuleNotFoundError:
            return None

    @staticmethod
    def registry(base: type) -> Any:
        """Return the module with vLLM's registry of replacements for a class: vLLM has two, one hardware-agnostic."""
        asked = (c.__module__ for c in base.__mro__ if c.__name__ in ("CustomOp", "PluggableLayer"))
        return importlib.import_module(next(asked, "vllm.model_executor.custom_op"))

    @property
    def is_hosts(self) -> bool:
        """Whether it stays vLLM's own on this device."""
        return self.cpu_only and detect_device().accelerator

    def wanted(self, settings: Settings) -> bool:
        """Whether the user wants it replaced; lists name classes or operators."""
        if self.own_kernel and not any(has_kernel(operator) for operator in self.operators):
            return False
        if self.is_hosts:
            return False
        return any(settings.registers(self.name, operator) for operator in self.operators)


_LAYERS = "vllm.model_executor.layers"
_ROPE = f"{_LAYERS}.rotary_embedding"
_MOE = f"{_LAYERS}.fused_moe"
_HW = "vllm.model_executor.hw_agnostic.layers"
_FUSERS = "vllm.model_executor.models.transformers.fusers"
_LINEAR = (
    "ReplicatedLinear",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
)
_ACTIVATIONS = (
    *("SiluAndMul", "GeluAndMul", "MulAndSilu", "FatreluAndMul", "SwigluOAIAndMul", "SiluAndMulWithClamp"),
    *("SwigluStepAndMul", "GeluAndMulSparse", "GELU", "GELUTanh", "NewGELU", "FastGELU", "QuickGELU"),
    *("ReLUSquaredActivation", "SituAndMul"),
)
"""Activations without weights in all tested versions."""

LAYER_CLASSES = (
    LayerClass(f"{_MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod", mixture.ExpertsLayer),
    LayerClass(f"{_MOE}.runner.moe_runner", "MoERunner", mixture.RunnerLayer),
    LayerClass(f"{_LAYERS}.layernorm", "RMSNorm", forwards.RMSNormLayer),
    LayerClass(f"{_LAYERS}.layernorm", "GemmaRMSNorm", forwards.GemmaRMSNormLayer),
    LayerClass(f"{_LAYERS}.layernorm", "LayerNorm", forwards.LayerNormLayer),
    LayerClass(f"{_LAYERS}.layernorm", "RMSNormGated", forwards.RMSNormGatedLayer),
    LayerClass(
        f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn",
        "QwenGatedDeltaNetAttention",
        delta_net.DeltaNetLayer,
        creates_context=True,
    ),
    LayerClass(f"{_LAYERS}.mamba.mamba_mixer", "MambaMixer", mamba1.Mamba1Layer),
    LayerClass(f"{_LAYERS}.mamba.mamba_mixer2", "MambaMixer2", mamba2.StateSpaceLayer),
    LayerClass(f"{_LAYERS}.mamba.mamba_mixer2", "Mixer2RMSNormGated", mamba2.StateSpaceNormLayer),
    LayerClass(f"{_LAYERS}.mamba.short_conv", "ShortConv", short_conv.ShortConvLayer),
    *(LayerClass(f"{_LAYERS}.activation", name, forwards.activation_layer(name)) for name in _ACTIVATIONS),
    LayerClass(f"{_LAYERS}.activation", "XIELU", forwards.XieluLayer),
    LayerClass(f"{_ROPE}.base", "RotaryEmbedding", forwards.RotaryLayer),
    LayerClass(f"{_ROPE}.llama3_rope", "Llama3RotaryEmbedding", forwards.RotaryLayer),
    LayerClass(f"{_ROPE}.linear_scaling_rope", "LinearScalingRotaryEmbedding", forwards.RotaryLayer),
    LayerClass(f"{_ROPE}.ntk_scaling_rope", "NTKScalingRotaryEmbedding", forwards.RotaryLayer),
    LayerClass(f"{_ROPE}.dynamic_ntk_scaling_rope", "DynamicNTKScalingRotaryEmbedding", forwards.RotaryLayer),
    LayerClass(f"{_ROPE}.dynamic_ntk_alpha_rope", "DynamicNTKAlphaRotaryEmbedding", forwards.RotaryLayer),
    LayerClass(f"{_ROPE}.yarn_scaling_rope", "YaRNScalingRotaryEmbedding", forwards.RotaryLayer),
    LayerClass(f"{_ROPE}.gemma4_rope", "Gemma4RotaryEmbedding", forwards.RotaryLayer),
    LayerClass(f"{_ROPE}.deepseek_scaling_rope", "DeepseekScalingRotaryEmbedding", forwards.RotaryLayer),
    LayerClass(
        f"{_ROPE}.phi3_long_rope_scaled_rope",
        "Phi3LongRoPEScaledRotaryEmbedding",
        forwards.LongRopeLayer,
        custom_op=False,
    ),
    LayerClass(f"{_ROPE}.mrope", "MRotaryEmbedding", forwards.MRotaryLayer),
    LayerClass(f"{_ROPE}.mrope_interleaved", "MRotaryEmbeddingInterleaved", forwards.ListedMRotaryLayer),
    LayerClass(f"{_ROPE}.ernie45_vl_rope", "Ernie4_5_VLRotaryEmbedding", forwards.ErnieRotaryLayer),
    LayerClass(f"{_ROPE}.bailing_mrope", "BailingMRotaryEmbedding", forwards.BailingRotaryLayer),
    *(
        LayerClass(module, name, encoder_attention.EncoderAttentionLayer, cpu_only=True)
        for module, name in (
            (f"{_LAYERS}.attention.mm_encoder_attention", "MMEncoderAttention"),
            ("vllm.model_executor.models.whisper", "WhisperEncoderAttention"),
        )
    ),
    *(LayerClass(f"{_LAYERS}.linear", name, linear.LinearLayer, own_kernel=True) for name in _LINEAR),
    LayerClass(f"{_MOE}.router.gate_linear", "GateLinear", linear.LinearLayer, own_kernel=True, cpu_only=True),
    LayerClass(f"{_LAYERS}.vocab_parallel_embedding", "ParallelLMHead", linear.HeadLayer, own_kernel=True),
    LayerClass(f"{_HW}.layernorm", "RMSNorm", forwards.RMSNormLayer),
    LayerClass(f"{_HW}.activation", "SiluAndMul", forwards.activation_layer("SiluAndMul")),
    LayerClass(f"{_FUSERS}.rms_norm", "TPAwareRMSNorm", forwards.RMSNormLayer, transformers=True),
    LayerClass(f"{_FUSERS}.rms_norm", "TPAwareGemmaRMSNorm", forwards.GemmaRMSNormLayer, transformers=True),
)
"""Classes that stay vLLM's, and why, are in :mod:`vllm_fl.host`."""


def register(settings: Settings, *, in_worker: bool = False, transformers: bool = False) -> None:
    """Register the wanted classes with vLLM and take back the unwanted ones. Idempotent.

    Args:
        settings: the lists.
        in_worker: whether this process runs models; otherwise rows are skipped that would load implementations
            (``own_kernel``) or create a context.
        transformers: whether the model runs in vLLM's Transformers backend.
    """
    warn_of_unknown_layers(settings, {name for row in LAYER_CLASSES for name in (row.name, *row.operators)})
    if in_worker:
        _warn_of_lists_without_kernels(settings)
    for row in LAYER_CLASSES:
        elsewhere = (row.own_kernel or row.creates_context) and not in_worker
        if elsewhere or (row.transformers and not transformers):
            continue
        if not row.custom_op:
            if (base := row.in_tree()) is not None:
                layer_classes.replace_class(base, _replacement(row, base) if row.wanted(settings) else base)
            continue
        if (base := row.in_tree()) is None:
            continue
        registry = row.registry(base)
        present = registry.op_registry_oot.get(row.name)
        ours = present is not None and issubclass(present, DispatchedLayer)
        if present is not None and not ours:
            if row.wanted(settings):
                logger.warning("%s stays with %s, which another plugin registered", row.name, present.__qualname__)
        elif ours and not row.wanted(settings):
            del registry.op_registry_oot[row.name]
        elif not ours and row.wanted(settings):
            registry.CustomOp.register_oot(name=row.name)(_replacement(row, base))


def _warn_of_lists_without_kernels(settings: Settings) -> None:
    """Log the named layers that stay the host's because none of our kernels would run."""
    for operator in sorted({operator for row in LAYER_CLASSES if row.own_kernel for operator in row.operators}):
        asked = {row.name for row in LAYER_CLASSES if operator in row.operators} | {operator}
        listed = sorted(asked & (settings.oot_whitelist or frozenset()))
        if listed and settings.policy.enabled and settings.oot_enabled and not has_kernel(operator):
            logger.warning(
                "'%s' in the white-list of out-of-tree layers has no effect: for '%s' nothing comes before the "
                "reference, which is vLLM's own code, so its layers stay vLLM's. VLLM_FL_PER_OP='%s=...' chooses",
                "', '".join(listed), operator, operator,
            )  # fmt: skip


@cache
def _replacement(row: LayerClass, base: type) -> type:
    return row.mixin.fl_metaclass(f"{row.name}FL", (row.mixin, base), {"__module__": __name__})


_COVERED = {(row.module, row.name): row for row in LAYER_CLASSES}


def _covered(module: nn.Module) -> LayerClass | None:
    """Return the row of a layer's class or of a class that it inherits from."""
    rows = (_COVERED.get((base.__module__, base.__name__)) for base in type(module).__mro__)
    return next((row for row in rows if row is not None), None)


def _attention_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, module in model.named_modules():
        if hasattr(module, "impl") and hasattr(module, "attn_backend"):
            yield prefix, module


def _adapters(model: nn.Module) -> list[Bindable]:
    """Return the wrappers of adapters that a model's layers share, each once."""
    found = (getattr(module, "punica_wrapper", None) for module in model.modules())
    return list({id(one): one for one in found if isinstance(one, Bindable)}.values())


AGAIN = "._shared_experts._layer."
"""The part of a prefix by which vLLM's runner of experts names shared experts a second time."""


def bind_scopes(model: nn.Module, *, untraced_only: bool = False) -> None:
    """Bind every layer's operators again for the layer's prefix, or only those outside accelerators' compiled graphs.

    Raises:
        ValueError: a rule names some of the layers that share a module, so it cannot be obeyed.
    """
    for module, named in prefixes_of(model).items():
        prefixes = [prefix for prefix in named if AGAIN not in prefix] or named
        if isinstance(module, DispatchedLayer) and not (untraced_only and module.fl_traced):
            bind_for(module, [*map(module.fl_scope, prefixes)])
        if (kernel := KERNEL.find(module)) is not None and not (untraced_only and kernel.fl_traced):
            bind_for(kernel, [prefix.removesuffix(".routed_experts") for prefix in prefixes])
    for prefix, module in _attention_layers(model):
        if isinstance(module.impl, Bindable):
            module.impl.fl_bind(getattr(module, "layer_name", prefix))
    for adapters in _adapters(model) if not untraced_only else ():
        adapters.fl_bind(None)


def survey(model: nn.Module) -> Survey:
    """Count the layers of a loaded model."""
    ours: dict[str, tuple[str, int]] = {}
    native: dict[str, int] = {}
    attention: dict[str, int] = {}
    for module in model.modules():
        row = _covered(module)
        if row is None or KERNEL.find(module) is not None:
            continue
        if isinstance(module, DispatchedLayer) and module.fl_runs():
            count(ours, row.name, module.fl_operator)
        elif not row.own_kernel and not row.is_hosts:
            native[row.name] = native.get(row.name, 0) + 1
    for _, layer, kernel in kernels(model):
        count(ours, kernel.fl_name(layer), kernel.fl_operator)
    for _, module in _attention_layers(model):
        name = type(module.impl).__name__
        attention[name] = attention.get(name, 0) + 1
    return Survey("vLLM", ours, native, attention)

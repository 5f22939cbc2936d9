"""The forwards of vLLM's layers, as calls of our operators: one mixin per family.

A mixin translates the arguments and attributes of vLLM's layer into the operator's arguments.
:mod:`vllm_fl.layers.classes` assigns mixins to vLLM's classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_dispatch.hosting.layers.activations import ACTIVATIONS, Activation, operators_name
from fl_dispatch.hosting.layers.bound_layer import BoundLayer
from fl_dispatch.hosting.positions import multimodal_rotary


class DispatchedLayer(BoundLayer):
    """A layer of vLLM with one of our operators as its forward. First base of every replacement class.

    Its subclasses annotate the attributes that they read of the vLLM class after them.
    """

    fl_metaclass: ClassVar[type[type]] = type
    """The metaclass of the replacement classes."""
    fl_traced: ClassVar[bool] = True
    """Whether compiled graphs contain its forward."""
    forward: Callable[..., Any]
    forward_native: Callable[..., Any]
    forward_oot: Callable[..., Any]
    _forward_method: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fl_bind(None)

    def fl_runs(self) -> bool:
        """Whether vLLM calls our forward: a user can switch single layers off with ``custom_ops``."""
        method = getattr(getattr(self, "_forward_method", None), "__func__", None)
        return method in (type(self).forward_oot, DispatchedLayer.forward_cuda)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that vLLM calls on its own CUDA platform."""
        return self.forward_oot(*args, **kwargs)


class NormLayer(DispatchedLayer):
    """``RMSNorm`` and ``GemmaRMSNorm``: ``forward(x, residual=None)``."""

    has_weight = True
    variance_size_override: int | None = None
    variance_epsilon: float
    weight: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.variance_size_override is not None:  # a mean over part of the row is not our operator
            self._forward_method = self.forward_native

    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        weight = self.weight if self.has_weight else None
        return self.fl_call(x, residual, weight, self.variance_epsilon)


class RMSNormLayer(NormLayer):
    fl_operator = "rms_norm"


class GemmaRMSNormLayer(NormLayer):
    fl_operator = "gemma_rms_norm"


class RMSNormGatedLayer(DispatchedLayer):
    """``RMSNormGated``: ``forward(x, z=None)``, where ``z`` is the gate."""

    fl_operator = "rms_norm_gated"
    weight: Tensor
    eps: float
    activation: str
    group_size: int | None
    norm_before_gate: bool

    def forward_oot(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        if z is None:
            return self.forward_native(x)
        activation = operators_name(self.activation)
        return self.fl_call(x, z, self.weight, self.eps, activation, self.group_size or 0, self.norm_before_gate)


class LayerNormLayer(DispatchedLayer):
    """``LayerNorm``: ``forward(x)``."""

    fl_operator = "layer_norm"
    weight: Tensor
    bias: Tensor | None
    eps: float

    def forward_oot(self, x: Tensor) -> Tensor:
        return self.fl_call(x, self.weight, self.bias, self.eps)


class ActivationLayer(DispatchedLayer):
    """``forward(x)`` of a class without weights."""

    fl_activation: ClassVar[Activation]
    fl_attributes: ClassVar[tuple[str, ...]]
    fl_constants: ClassVar[tuple[str, ...]]

    def forward_oot(self, x: Tensor) -> Tensor:
        return self.fl_call(x, *[getattr(self, name) for name in self.fl_attributes], *self.fl_constants)


@cache
def activation_layer(name: str) -> type[ActivationLayer]:
    """Make the mixin for a class of vLLM that :data:`~fl_dispatch.hosting.layers.activations.ACTIVATIONS` has."""
    found = ACTIVATIONS[name]
    body = {"__module__": __name__, "fl_operator": found.operator, "fl_activation": found}
    parameters = {"fl_attributes": found.attributes, "fl_constants": found.constants}  # plain, for Dynamo's guards
    return type(f"{name}Layer", (ActivationLayer,), {**body, **parameters})


class XieluLayer(DispatchedLayer):
    """``XIELU``: ``forward(input)``."""

    fl_operator = "xielu"
    alpha_p: Tensor
    alpha_n: Tensor
    _beta_scalar: float
    _eps_scalar: float

    def forward_oot(self, input: Tensor) -> Tensor:
        return self.fl_call(input, self.alpha_p, self.alpha_n, self._beta_scalar, self._eps_scalar)


class RotaryLayer(DispatchedLayer):
    """``RotaryEmbedding`` and its subclasses: ``forward(positions, query, key=None)`` on flattened heads.

    ``offsets`` of some subclasses are added to the positions.
    """

    fl_operator = "rotary_embedding"
    fl_table: tuple[Tensor | None, Tensor, Tensor] = (None, torch.empty(0), torch.empty(0))
    head_size: int
    is_neox_style: bool
    _match_cos_sin_cache_dtype: Callable[[Tensor], Tensor]

    def _cos_sin(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return both halves of vLLM's table ``[positions, cos | sin]``."""
        if torch.compiler.is_compiling():  # chunk() is free inside a graph, and cached views would be baked into it
            cos, sin = cache.chunk(2, dim=-1)
            return cos, sin
        if cache is not self.fl_table[0]:
            cos, sin = cache.chunk(2, dim=-1)
            self.fl_table = (cache, cos, sin)
        return self.fl_table[1], self.fl_table[2]

    def _table(self, positions: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines, sines, and the row of each token in these tables."""
        return *self._cos_sin(self._match_cos_sin_cache_dtype(query)), positions.flatten()

    def forward_oot(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        cos, sin, rows = self._table(positions if offsets is None else positions + offsets, query)
        heads = (rows.shape[0], -1, self.head_size)
        rotated, rotated_key = self.fl_call(
            query.view(heads),
            None if key is None else key.view(heads),
            cos,
            sin,
            rows,
            not self.is_neox_style,
            # query and key are slices of one tensor: a graph that may not write to it would copy it first
            not torch.compiler.is_compiling(),
        )
        return rotated.reshape(query.shape), None if key is None else rotated_key.reshape(key.shape)


class LongRopeLayer(RotaryLayer):
    """``Phi3LongRoPEScaledRotaryEmbedding``: the table for short contexts comes before the one for long contexts.

    It is a plain module, so its forward is replaced, and vLLM cannot switch it off.
    """

    is_neox_style = True
    use_long_rope: bool
    original_max_position_embeddings: int
    long_short_cos_sin_cache: Tensor

    def _table(self, positions: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.original_max_position_embeddings if self.use_long_rope else 0
        cos, sin = self._cos_sin(self.long_short_cos_sin_cache)
        return cos[first:], sin[first:], positions.flatten()

    def fl_runs(self) -> bool:
        return True

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.forward_oot(positions, query, key, offsets)


class MRotaryLayer(RotaryLayer):
    """``MRotaryEmbedding``: an image token has a position on several axes; each frequency rotates by one of them."""

    fl_axes: Tensor
    mrope_section: list[int]
    mrope_interleaved: bool
    register_buffer: Callable[..., None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        axes = self._axes() if self.mrope_section else []
        indices = torch.tensor(axes, dtype=torch.int64)
        self.register_buffer("fl_axes", indices, persistent=False)

    def _axes(self) -> list[int]:
        """Return the axis of each frequency: 0 time, 1 height, 2 width."""
        sections = self.mrope_section
        if not self.mrope_interleaved:
            return [axis for axis, size in enumerate(sections) for _ in range(size)]
        cycle = (index % 3 for index in range(sum(sections)))
        return [axis if index < 3 * sections[axis] else 0 for index, axis in enumerate(cycle)]

    def _table(self, positions: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if positions.ndim == 1:  # text
            return super()._table(positions, query)
        if not self.mrope_section:
            raise ValueError("positions on several axes need the model's mrope_section")
        cos, sin = self._cos_sin(self._match_cos_sin_cache_dtype(query))
        return multimodal_rotary.step_tables(cos, sin, positions, self.fl_axes)


class ErnieRotaryLayer(MRotaryLayer):
    """``Ernie4_5_VLRotaryEmbedding``; its sections are height, width, time."""

    def _axes(self) -> list[int]:
        return multimodal_rotary.alternating_axes(sum(self.mrope_section[:2]), sum(self.mrope_section))


class BailingRotaryLayer(MRotaryLayer):
    """``BailingMRotaryEmbedding``; its sections are time, height, width."""

    def _axes(self) -> list[int]:
        return multimodal_rotary.alternating_axes(sum(self.mrope_section[1:]), sum(self.mrope_section))


class ListedMRotaryLayer(MRotaryLayer):
    """``MRotaryEmbeddingInterleaved``: lists the axis of each frequency, and overrides ``forward``."""

    mrope_dim: list[int]

    def _axes(self) -> list[int]:
        return self.mrope_dim[: len(self.mrope_dim) // 2]  # once for the cosines, once for the sines

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        run = self.forward_oot if self.fl_runs() else super().forward
        return run(positions, query, key)

"""Quantized layers of a host in this process, without an engine: kernels, loaded weights, and refusals.

The fixture ``layers`` of a host's folder is a :class:`Layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import pytest
import torch
from torch import Tensor, nn

import quantized_served
from fl_dispatch.devices import CPU
from host_engines import Scenario
from quantized_checkpoints import AWQ, CACHE_SCHEME, FP8_CONFIG, GPTQ, SCHEMES, W4, compressed
from quantized_mixture import EXPERTS, GIVEN
from quantized_served import LAYERS, OWN, SIZE, described

COUNT = 2
"""Experts of a mixture."""
MIXTURE, PREFIX = LAYERS["experts"], LAYERS["linear"]
PACKED = compressed("pack-quantized", W4, None)
GROUPS_OF_128 = compressed("pack-quantized", {**W4, "group_size": 128}, None)
BYTES = SCHEMES["compressed-tensors W8A16 int8"].config
GPTQ4 = {**GPTQ, "bits": 4, "group_size": 32}
SHARDS: Mapping[str, str] = {"w1": "w13", "w3": "w13", "w2": "w2"}
"""Products of an expert → the parameter that holds them."""
NAMED = [f"{MIXTURE}.{number}.{name}" for number in range(COUNT) for name in ("gate_proj", "up_proj", "down_proj")]
ELSEWHERE = [name.replace("layers.0", "layers.1") for name in NAMED]


ABSORBED = [name for name in EXPERTS if name not in (*GIVEN, "fp8, blocks of 128")]
"""Schemes of latent attention. fp8 in blocks needs several blocks; vLLM would take one scale for a whole weight's."""


class Layers(Protocol):
    """A host's layers.

    Args:
        name: the host's name.
        kv_cache_dtype: the dtype of the cache in the user's settings.
    """

    name: str
    kv_cache_dtype: str

    def config(self, said: Mapping[str, Any]) -> Any:
        """Return the host's object for a ``quantization_config``, with the merged layers."""

    def layer(self, kind: str) -> Any:
        """Return a layer of a kind in :data:`quantized_served.LAYERS`, not filled by its constructor."""

    def linear_kernel(self, method: Any, layer: Any) -> Any:
        """Return our kernel with which a method computes a filled layer, or the name of the host's own."""

    def absorbed(self, layer: Any, method: Any) -> Tensor:
        """Return the weight that the host gets from a loaded layer for the absorbed form of latent attention."""

    def has_scales(self, config: Any, method: Any) -> bool:
        """Whether a cache's method expects the scales declared by the checkpoint."""

    def mixture(self, said: Mapping[str, Any], hidden: int, inner: int, ranks: int = 1, rank: int = 0) -> Any:
        """Return a filled layer of :data:`COUNT` experts; each rank holds a part of ``inner``."""

    def experts_kernel(self, layer: Any) -> Any:
        """Return our kernel of a layer of experts; ``None`` without quantization."""

    def computed(self, layer: Any, x: Tensor, expert: int) -> Tensor:
        """Return a loaded layer's results for tokens that all go to one expert."""


def method_of(layers: Layers, said: Mapping[str, Any], kind: str = "linear") -> tuple[Any, Any]:
    """Return a layer of a kind, and its method with a checkpoint."""
    layer = layers.layer(kind)
    return layer, layers.config(said).get_quant_method(layer, LAYERS[kind])


def filled(layers: Layers, said: Mapping[str, Any], kind: str = "linear") -> tuple[Any, Any]:
    """Return a linear layer with a checkpoint's parameters, and its method."""
    layer, method = method_of(layers, said, kind)
    parts = [SIZE, SIZE] if kind == "joined" else [SIZE]
    method.create_weights(layer, SIZE, parts, SIZE, sum(parts), torch.float32, weight_loader=print)
    return layer, method


def ask(layers: Layers, said: Mapping[str, Any], kind: str) -> str:
    """Return in words the kernel for a kind of a checkpoint's layers."""
    if kind == "experts":
        experts = layers.mixture(said, SIZE, SIZE)
        kernel = layers.experts_kernel(experts)
        return OWN if kernel is None else described(kernel, experts)
    layer, method = method_of(layers, said, kind)
    if kind == "cache":
        return "scales of the checkpoint" if layers.has_scales(layers.config(said), method) else OWN
    if method is None or type(method).__name__.startswith("Unquantized"):
        return OWN
    layer, method = filled(layers, said, kind)
    kernel = layers.linear_kernel(method, layer)
    return kernel if isinstance(kernel, str) else described(kernel, layer)


def load(layer: Any, scheme: str, size: int = SIZE, without: str = "") -> list[Mapping[str, Tensor]]:
    """Load random experts like the host's models; return their dequantized weights.

    Args:
        layer: a layer of experts, :data:`SIZE` columns wide on each rank.
        size: rows and columns of their weights in the checkpoint.
        without: a parameter that the checkpoint lacks for the last expert.
    """
    generator, found = torch.Generator().manual_seed(0), []
    for expert in range(COUNT):
        weights: dict[str, Tensor] = {}
        for shard, target in SHARDS.items():
            stored, weights[shard] = SCHEMES[scheme].write(torch.randn((size, size), generator=generator))
            for name, value in ((f"{target}_{suffix}", value) for suffix, value in stored.items()):
                dropped = name.endswith("g_idx") and not hasattr(layer, name)  # by vLLM's models
                if (name, expert) != (without, COUNT - 1) and not dropped:
                    layer.weight_loader(getattr(layer, name), value, f"{MIXTURE}.{name}", shard, expert)
        found.append(weights)
    return found


METHODS: Mapping[str, str] = {
    "fbgemm_fp8": "quantize with llm-compressor's scheme 'FP8_DYNAMIC'",
    "torchao": "quantize with llm-compressor's scheme 'FP8_DYNAMIC' or 'W8A8', or 'W4A16', because torchao's files "
    "have parts of its own classes of tensors",
    "bitsandbytes": "quantize with llm-compressor's scheme 'W4A16'",
}
"""A method that is not served → the alternatives."""


class QuantizedLayers(Scenario):
    """Linear layers, heads, embeddings and caches; the list also has the kernels of experts."""

    METHODS: ClassVar[Mapping[str, str]] = METHODS
    REFUSAL: ClassVar[str]
    """The whole refusal of a method; ``{method}`` is its name and ``{works}`` the alternatives."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"method": [*self.METHODS], "scheme": ABSORBED}

    def refusal(self, method: str) -> str:
        """Return the host plugin's refusal of a method."""
        raise NotImplementedError

    def test_each_layer_of_each_checkpoint_is_served_or_refused_as_recorded(self, layers: Layers) -> None:
        with torch.device("meta"):
            quantized_served.check(layers.name, quantized_served.answered(lambda *asked: ask(layers, *asked)))

    def test_absorbed_weights_are_those_that_the_checkpoint_stands_for(self, scheme: str, layers: Layers) -> None:
        layer, method = filled(layers, SCHEMES[scheme].config)
        stored, weight = SCHEMES[scheme].write(torch.randn((SIZE, SIZE), generator=torch.Generator().manual_seed(0)))
        for name, value in stored.items():
            if (parameter := getattr(layer, name, None)) is not None:
                parameter.data.copy_(value.view_as(parameter))
        method.process_weights_after_loading(layer)
        torch.testing.assert_close(layers.absorbed(layer, method), weight, rtol=1e-5, atol=1e-6)

    def test_a_method_that_is_not_served_is_refused_with_what_works(self, method: str, layers: Layers) -> None:
        assert self.refusal(method) == self.REFUSAL.format(method=method, works=self.METHODS[method])

    def test_a_checkpoint_with_a_scale_a_head_is_served_with_a_cache_that_is_not_quantized(
        self, layers: Layers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = {**PACKED, "kv_cache_scheme": {**CACHE_SCHEME, "strategy": "attn_head"}}
        with pytest.raises(ValueError, match="with a scale for each head"):
            method_of(layers, said, "cache")
        monkeypatch.setattr(layers, "kv_cache_dtype", "bfloat16")
        assert method_of(layers, said, "cache")


class QuantizedExperts(Scenario):
    """Mixtures of experts, loaded from each kind of served checkpoint."""

    LEFT: ClassVar[Sequence[tuple[Mapping[str, Any], bool]]] = (
        ({**FP8_CONFIG, "ignored_layers": NAMED}, True),
        ({**FP8_CONFIG, "ignored_layers": [*ELSEWHERE, "lm_head"]}, False),
        ({**FP8_CONFIG, "modules_to_not_convert": NAMED}, True),
        ({**FP8_CONFIG, "modules_to_not_convert": [*ELSEWHERE, "lm_head"]}, False),
        ({**GPTQ4, "dynamic": {r"-:.*\.mlp\.experts": {}}}, True),
        ({**GPTQ4, "dynamic": {r"-:.*\.mlp\.gate$": {}}}, False),
        ({**AWQ, "modules_to_not_convert": ["layers.0.mlp"]}, True),
        ({**AWQ, "modules_to_not_convert": ["layers.1.mlp", "lm_head"]}, False),
        ({**PACKED, "ignore": NAMED}, True),
        ({**PACKED, "ignore": [r"re:.*mlp\.experts.*"]}, True),
        ({**PACKED, "ignore": ELSEWHERE}, False),
    )
    """Configurations, and whether they leave the experts unquantized."""
    DIVIDED: ClassVar[Sequence[tuple[Mapping[str, Any], int, int, int, str]]] = (
        *(
            (said, *sizes)
            for said in (
                {**GPTQ4, "group_size": 128},
                {**AWQ, "group_size": 128},
                compressed("pack-quantized", {**W4, "group_size": 128}, None),
            )
            for sizes in (
                (256, 768, 4, "192 elements on a rank, not a multiple of a group's 128"),
                (256, 1408, 2, "704 elements on a rank, not a multiple of a group's 128"),
                (192, 256, 1, "192 elements on a rank, not a multiple of a group's 128"),
            )
        ),
        (GPTQ4, 128, 48, 1, "48 elements on a rank, not a multiple of a group's 32"),
        ({**GPTQ4, "group_size": -1}, 64, 40, 2, "20 elements on a rank, not a multiple of a word's 8"),
        ({**GPTQ4, "bits": 3, "group_size": 16}, 128, 48, 1, "48 elements on a rank, not a multiple of a word's 32"),
        (AWQ, 48, 128, 1, "48 elements on a rank, not a multiple of a group's 32"),
        (
            SCHEMES["compressed-tensors W8A16 int8"].config,
            128,
            42,
            1,
            "42 elements on a rank, not a multiple of a word's 4",
        ),
    )
    """Configurations, sizes, ranks, and the refusal."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {
            "scheme,rank": [(scheme, rank) for scheme in EXPERTS for rank in (None, 0, 1)],
            "scheme": EXPERTS,
            "said,left": self.LEFT,
            "said,hidden,inner,ranks,refused": self.DIVIDED,
        }

    def test_each_expert_computes_with_the_weights_that_its_checkpoint_stands_for(
        self, scheme: str, rank: int | None, layers: Layers
    ) -> None:
        """Test each ``rank`` of two that share every expert."""
        size = 2 * SIZE
        mine = slice(None) if rank is None else slice(rank * SIZE, (rank + 1) * SIZE)
        layer = layers.mixture(SCHEMES[scheme].config, size, size, *(() if rank is None else (2, rank)))
        experts = load(layer, scheme, size)
        layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(5, size, generator=torch.Generator().manual_seed(1))

        def right(weights: Mapping[str, Tensor], change: Callable[[Tensor], Tensor] = lambda rows: rows) -> Tensor:
            rows = change(x[None])  # the library has a scale per token only for batches of texts
            between = nn.functional.silu(rows @ weights["w1"][mine].t()) * (rows @ weights["w3"][mine].t())
            return (change(between) @ weights["w2"][:, mine].t())[0]

        for number, weights in enumerate(experts):
            got, plain = layers.computed(layer, x, number), right(weights)
            if (change := SCHEMES[scheme].rows) is None:
                torch.testing.assert_close(got, plain, rtol=1e-4, atol=2e-3)
                continue
            far = (got - right(weights, change)).norm()
            assert far <= 0.02 * plain.norm()  # quantized inputs may change by a step
            assert far < (got - plain).norm() / 2

    def test_experts_that_a_checkpoint_leaves_as_they_are_are_not_quantized(
        self, said: Mapping[str, Any], left: bool, layers: Layers
    ) -> None:
        layer = layers.mixture(said, SIZE, SIZE)
        assert (layers.experts_kernel(layer) is None) == left
        assert hasattr(layer, "w13_weight") == (left or said["quant_method"] == "fp8")

    def test_a_scale_that_the_checkpoint_lacks_is_noticed(self, scheme: str, layers: Layers) -> None:
        def made() -> Any:
            return layers.mixture(SCHEMES[scheme].config, SIZE, SIZE)

        scales = [name for name, _ in made().named_parameters() if "scale" in name]
        assert len(scales) == 2 + 2 * ("NVFP4" in scheme) + 2 * (scheme in GIVEN)
        for without in scales:
            layer = made()
            load(layer, scheme, SIZE, without)
            with pytest.raises(ValueError, match=rf"the checkpoint has no '{without}' for a layer that it quantizes"):
                layer.quant_method.process_weights_after_loading(layer)

    def test_a_gate_and_an_up_with_different_scales_of_inputs_are_refused(self, layers: Layers) -> None:
        scheme, name = "compressed-tensors NVFP4", "w13_input_global_scale"
        layer = layers.mixture(SCHEMES[scheme].config, SIZE, SIZE)
        load(layer, scheme)
        getattr(layer, name).data[1, 0] *= 2
        with pytest.raises(ValueError, match=f"'{name}' differs for the gate and for 'up' of an expert"):
            layer.quant_method.process_weights_after_loading(layer)

    def test_parts_of_experts_that_do_not_stand_alone_are_refused(
        self, said: Mapping[str, Any], hidden: int, inner: int, ranks: int, refused: str, layers: Layers
    ) -> None:
        with pytest.raises(ValueError, match=rf"_fl does not support experts with {refused} \({MIXTURE}\) yet"):
            layers.mixture(said, hidden, inner, ranks)
        assert layers.experts_kernel(layers.mixture(said, 256, 256 * ranks, ranks))

    def test_experts_in_fp8_are_refused_on_a_chip_without_it(
        self, layers: Layers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from fl_dispatch.hosting.quantized import layers as quantized

        monkeypatch.setattr(quantized, "detect_device", lambda: replace(CPU, float8=False))
        for scheme in EXPERTS:
            if SCHEMES[scheme].layer.startswith(("Fp8", "Mxfp8")):
                with pytest.raises(ValueError, match=r"_fl does not support .*\(cpu has no float8_e4m3fn\) yet"):
                    layers.mixture(SCHEMES[scheme].config, SIZE, SIZE)
            else:
                assert layers.experts_kernel(layers.mixture(SCHEMES[scheme].config, SIZE, SIZE))

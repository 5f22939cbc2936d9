"""The plugin's knowledge of vLLM, for ``tools/host_check.py`` and for the names in a user's lists.

Importing this module imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator

from fl_dispatch.devices.spec import GRAPH_NAMES, STREAM_NAMES
from fl_dispatch.hosting.facts import yaml_file
from fl_dispatch.hosting.facts.fact import HostFact
from fl_dispatch.hosting.facts.host import Host, HostLayers

from . import extensions
from .layers.classes import LAYER_CLASSES
from .runner_kernels import table

_LAYERS = "vllm.model_executor.layers"

_LEFT = {
    "a base class, which computes nothing": (
        "RotaryEmbeddingBase",
        "LinearBase",
        "MoERunnerInterface",
        "ConvLayerBase",
    ),
    "a table for each head": ("FourierRotaryEmbedding",),
    "rotates a query five times": ("DualChunkRotaryEmbedding",),
    "rotates by complex numbers, without positions": ("Llama4VisionRotaryEmbedding",),
    "rotates the last elements of a head, and back": ("DeepseekV4ScalingRotaryEmbedding",),
    "rotates in encoders of images; there is no operator for it": ("ApplyRotaryEmb",),
    "layers with a state are refused at start, except those with rows": (
        f"{_LAYERS}.mamba",
        "vllm.third_party.flash_linear_attention",
        "BailingMoeV3KimiDeltaAttention",
        "Glm5NextLinearAttention",
        "KimiK3DeltaAttention",
    ),
    "of a model with linear attention, which is refused at start": (
        "_Glm5NextMergedColumnParallelLinear",
        "_KimiGDNMergedColumnParallelLinear",
        "KimiK3MergedQKVGateLinear",
        "KimiK3MultiHeadLatentAttentionWrapper",
        "LatentMoERunner",
        "ROCmLatentMoERunner",
    ),
    "its layer is ours, and none calls it": ("ChunkGatedDeltaRule",),
    "copies of queries in decode context parallelism are refused at start": ("DCPGroupColumnParallelLinear",),
    "the indexer that calls it is ours; other sparse attention is refused at start": (
        "SparseAttnIndexer",
        "RocmSparseAttnIndexer",
        "Gfx942SparseAttnIndexer",
        "SparseAttnIndexerKpool",
    ),
    "quantizes for vLLM's own kernels, which are not asked": (
        "QuantFP8",
        "_DecodeConcatQuantFP8",
        "DeepseekV4HeterogeneousSharedRoutedExperts",
    ),
    "PyTorch's own lookup; there is no operator for the vocabulary": (
        "VocabParallelEmbedding",
        "LogitsProcessor",
        "_VocabParallelEmbeddingBase",
        "BartScaledWordEmbedding",
        "InklingLogitsProcessor",
        "SpecializedDecodeLogitsProcessor",
        "PLEVocabParallelEmbedding",
        "Qwen4ExpPLEEmbedding",
        "Qwen4ExpPLEDeviceEmbedding",
        "Qwen4ExpPLEPinnedHostEmbedding",
    ),
    "makes tables for encoders of images; there is no operator for it": ("VitMropeSetup",),
    "attention of encoders with a bias for each pair of positions, or masks; there is no operator for it": (
        "RelPosAttention",
        "CustomQwen2Decoder",
    ),
    "an attention layer; its class of attention is ours": ("StaticSinkAttention",),
    "joins layers that are ours": ("MultiHeadLatentAttentionWrapper",),
    "holds weights; the method that computes is ours": (
        "RoutedExperts",
        "DbrxExperts",
        "GptOssRoutedExperts",
        "SubstitutedRoutedExperts",
        "TransformersRoutedExperts",
    ),
    "experts with a norm behind each; there is no operator for it": (
        "MuseMoERunner",
        "MuseSparkConsolidatedRoutedExperts",
        "MuseSparkRoutedExperts",
        "MuseSparkUnquantizedFusedMoE",
    ),
    "its router is Transformers' own code; the method that computes is ours": ("TransformersMoERunner",),
    "its routers are ours, and none calls it": ("GroupedTopk",),
    "kernels for exchanges of tokens that are refused at start": ("FusedMoEModularMethod",),
    "a convolution; there is no operator for it": ("Conv2dLayer", "Conv3dLayer"),
    "hyper-connections; there is no operator for them": (
        "HCHeadOp",
        "MHCFusedPostPreOp",
        "MHCPostOp",
        "MHCPreDelayedOp",
        "MHCPreOp",
    ),
    "compiled kernels of one model": ("HpcRopeNorm", "FusedMMInputNorm", "MiniMaxText01RMSNormTP"),
    "the weight plus one; there is no operator for it": ("NemotronLayerNorm1P",),
}
"""Why → the classes that stay vLLM's: a class, or all classes of a module."""

_PENDING = {
    "its product could run linear; rows go by exact name, and it has none": (
        "DeepSeekV2FusedQkvAProjLinear",
        "MinimaxM3QKVParallelLinearWithIndexer",
        "MuseSpark1xQKVOGateParallelLinear",
        "Qwen4ExpQSAQKVIndexerLinear",
        "Step5FusedQKVIndexerLinear",
        "Step5SparseIndexerIndexTPLinear",
    ),
    "its norm of each group could run rms_norm; now it calls vLLM's compiled operator": ("K2HorizonRMSNorm",),
}
"""The missing part → classes that could run our operators but do not yet."""


def _implied() -> Iterator[HostFact]:
    """Yield the facts that follow from our tables: streams, kernels with forms, layer classes."""
    why = "vLLM's model runners take streams, events and graphs from there, whatever the device's module is."
    yield HostFact("torch.cuda", (*STREAM_NAMES, *GRAPH_NAMES), "replaces", "compat.streams", why)
    why = "A Triton kernel of the V2 model runner; devices without a Triton driver run its PyTorch form."
    for module, names in table.by_module().items():
        owner = f"{table.WORKER}.{module}"
        yield HostFact(owner, names, "replaces", "runner_kernels.table", why)
    yield from (fact for row in LAYER_CLASSES for fact in row.facts)


HOST = Host(
    name="vLLM",
    package="vllm",
    plugin="vllm_fl",
    facts=lambda: yaml_file.facts("vllm_fl", "vllm", (*_implied(), *extensions.facts())),
    layers=HostLayers(
        roots=tuple(
            f"vllm.model_executor.{place}custom_op:{name}"
            for place in ("", "hw_agnostic.")
            for name in ("CustomOp", "PluggableLayer")
        ),
        replaced=frozenset(f"{row.module}:{row.name}" for row in LAYER_CLASSES),
        left={name: why for why, names in _LEFT.items() for name in names},
        pending={name: why for why, names in _PENDING.items() for name in names},
        inherited=False,
    ),
)

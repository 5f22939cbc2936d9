"""Names that this package relies on in SGLang, for the table of :mod:`sglang_fl.host_facts`."""

from __future__ import annotations

from fl_dispatch.hosting.host_facts import HostFact

_LAYERS = "sglang.srt.layers"
_QUANTIZATION = f"{_LAYERS}.quantization"
_CONFIGS, _SCHEMES, _EXPERTS = "quantization.configs", "quantization.schemes", "quantization.experts"
_ASKED = ("get_quant_method(layer, prefix)", "get_supported_act_dtypes()", "get_min_capability()")
_COMPRESSED = f"{_QUANTIZATION}.compressed_tensors"
_SINCE = "0.5.23"

FACTS = (
    HostFact(
        "sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA",
        ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "w_kc", "w_vc"),
        "reads",
        "quantization.latent",
        "The absorbed form of latent attention multiplies with the two parts of a weight.",
        since=_SINCE,
    ),
    HostFact(
        "sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA",
        ("_use_min_latency_fused_a_gemm",),
        "replaces",
        "quantization.latent",
        "SGLang would ask packed layers for a weight in bfloat16.",
        since=_SINCE,
    ),
    HostFact(
        _QUANTIZATION,
        ("QUANTIZATION_METHODS",),
        "reads",
        "quantization.__init__",
        "SGLang lists GPTQ for the platforms alone that it knows, and takes methods of its own for NVIDIA GPUs.",
        since=_SINCE,
    ),
    *(
        HostFact(owner, _ASKED, "overrides", _CONFIGS, "SGLang's methods are kernels of CUDA's.", since=_SINCE)
        for owner in (
            f"{_QUANTIZATION}.fp8:Fp8Config",
            f"{_QUANTIZATION}.gptq.gptq:GPTQConfig",
            f"{_QUANTIZATION}.awq.awq:AWQConfig",
            f"{_COMPRESSED}.compressed_tensors:CompressedTensorsConfig",
        )
    ),
    HostFact(
        f"{_QUANTIZATION}.fp8:Fp8Config",
        ("is_checkpoint_fp8_serialized", "use_mxfp8", "ignored_layers", "weight_block_size", "activation_scheme"),
        "reads",
        _CONFIGS,
        "What a checkpoint says.",
        since=_SINCE,
    ),
    HostFact(
        f"{_COMPRESSED}.compressed_tensors:CompressedTensorsConfig",
        (
            "get_scheme_dict(layer, layer_name=None, matched_target=None)",
            "_add_fused_moe_to_target_scheme_map()",
            "quant_format",
            "target_scheme_map",
            "ignore",
        ),
        "reads",
        _CONFIGS,
        "What a checkpoint says.",
        since=_SINCE,
    ),
    HostFact(
        f"{_QUANTIZATION}.gptq.gptq:GPTQConfig",
        ("from_config(config)",),
        "overrides",
        _CONFIGS,
        "SGLang leaves out whether weights are symmetric.",
        since=_SINCE,
    ),
    HostFact(
        f"{_QUANTIZATION}.gptq.gptq:GPTQConfig",
        ("weight_bits", "group_size", "desc_act", "lm_head_quantized"),
        "reads",
        _CONFIGS,
        "What a checkpoint says.",
        since=_SINCE,
    ),
    HostFact(
        f"{_QUANTIZATION}.awq.awq:AWQConfig",
        ("weight_bits", "group_size", "zero_point", "modules_to_not_convert"),
        "reads",
        _CONFIGS,
        "What a checkpoint says.",
        since=_SINCE,
    ),
    HostFact(
        f"{_QUANTIZATION}.utils",
        ("is_layer_skipped(prefix, ignored_layers, fused_mapping=MappingProxyType({}))",),
        "reads",
        _CONFIGS,
        "Layers that a checkpoint leaves as they are.",
        since=_SINCE,
    ),
    HostFact(
        f"{_QUANTIZATION}.base_config:LinearMethodBase",
        (
            (
                "create_weights(layer, input_size_per_partition, output_partition_sizes, input_size, output_size, "
                "params_dtype, **extra_weight_attrs)"
            ),
            "apply(layer, x, bias=None)",
        ),
        "overrides",
        _SCHEMES,
        "SGLang asks a layer's method.",
        since=_SINCE,
    ),
    *(
        HostFact(
            f"{_QUANTIZATION}.base_config:QuantizeMethodBase",
            ("process_weights_after_loading(layer)",),
            "overrides",
            module,
            "SGLang asks a layer's method.",
            since=_SINCE,
        )
        for module in (_SCHEMES, _EXPERTS)
    ),
    HostFact(
        f"{_QUANTIZATION}.base_config:FusedMoEMethodBase",
        (
            (
                "create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, "
                "**extra_weight_attrs)"
            ),
            "create_moe_runner(layer, moe_runner_config)",
            "apply(layer, dispatch_output)",
        ),
        "overrides",
        _EXPERTS,
        "SGLang asks a layer's method.",
        since=_SINCE,
    ),
    HostFact(
        f"{_LAYERS}.moe.fused_moe_triton.layer:FusedMoE",
        (
            "weight_loader(param, loaded_weight, weight_name, shard_id, expert_id)",
            "layer_name",
            "moe_runner_config",
            "moe_tp_size",
        ),
        "reads",
        _EXPERTS,
        "How experts are loaded, and their sizes.",
        since=_SINCE,
    ),
    HostFact(
        f"{_QUANTIZATION}.kv_cache:BaseKVCacheMethod",
        ("process_weights_after_loading(layer)",),
        "overrides",
        "quantization.cache",
        "SGLang takes 1 for scales that a model does not load.",
        since=_SINCE,
    ),
    HostFact(
        f"{_LAYERS}.radix_attention:RadixAttention",
        ("k_scale_float", "v_scale_float"),
        "reads",
        "attention.attention_backend",
        "Scales of a cache in fp8.",
        since=_SINCE,
    ),
    HostFact(
        f"{_LAYERS}.linear:LinearBase",
        ("scheme",),
        "replaces",
        _CONFIGS,
        "SGLang asks it which loader the parameters are for (`requires_weight_loader_v2`).",
        since=_SINCE,
    ),
    *(
        HostFact(f"{_LAYERS}.parameter", (name,), "reads", _SCHEMES, "How parameters are loaded.", since=_SINCE)
        for name in (
            "BasevLLMParameter",
            "BlockQuantScaleParameter",
            "ChannelQuantScaleParameter",
            "GroupQuantScaleParameter",
            "ModelWeightParameter",
            "PackedColumnParameter",
            "PackedvLLMParameter",
            "PerTensorScaleParameter",
            "RowvLLMParameter",
        )
    ),
)

"""Names that this package relies on in vLLM, for the table of :mod:`vllm_fl.host_facts`."""

from __future__ import annotations

from fl_dispatch.hosting.host_facts import HostFact, Verb

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_LINEAR = "vllm.model_executor.kernels.linear"
_COMPRESSED = f"{_QUANTIZATION}.compressed_tensors.compressed_tensors:CompressedTensorsConfig"
_SCHEMES = f"{_QUANTIZATION}.compressed_tensors.schemes"
_CONFIGS = "quantization.configs"
_ASKS = "vLLM's code asks for CUDA's kernels before ours are chosen."
_CONFIG = ("get_quant_method(layer, prefix)", "get_supported_act_dtypes()", "from_config(config)")
_CREATE = "layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype"
_EXPERTS = "quantization.experts"
_MOE = "vllm.model_executor.layers.fused_moe"
_COMPRESSED_MOE = f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe"

_BLOCKS: tuple[tuple[str, Verb, str], ...] = (
    (f"{_QUANTIZATION}.fp8:Fp8LinearMethod", "overrides", ""),
    (f"{_SCHEMES}.compressed_tensors_w8a8_fp8:CompressedTensorsW8A8Fp8", "replaces", ", weight_loader"),
)
"""Owners of weights in blocks, the use that is made of their ``create_weights``, and a parameter more of it."""
FACTS = (
    HostFact(
        _LINEAR,
        (
            "register_linear_kernel(kernel_class, platform, kernel_type)",
            "_POSSIBLE_WFP8A16_KERNELS",
        ),
        "reads",
        "quantization.kernels",
        "The kernels of quantized layers that a platform has.",
        since="0.32",
    ),
    HostFact(
        _LINEAR,
        ("_POSSIBLE_FP8_BLOCK_KERNELS",),
        "reads",
        "quantization.kernels",
        "vLLM 0.33 has a word for these kernels.",
        since="0.32",
        until="0.33",
    ),
    HostFact(
        _QUANTIZATION,
        ("register_quantization_config(quantization)",),
        "reads",
        _CONFIGS,
        "Configurations of our own under vLLM's names.",
        since="0.32",
    ),
    HostFact(
        "vllm.model_executor.layers.linear",
        ("register_weight_loader_v2_supported_method(cls)",),
        "reads",
        _CONFIGS,
        "vLLM knows by a class's name how parameters of merged layers load.",
        since="0.32",
    ),
    *(
        HostFact(f"{_QUANTIZATION}.{owner}", ("__init__(quant_config)",), "overrides", _CONFIGS, _ASKS, since="0.32")
        for owner in ("auto_gptq:AutoGPTQLinearMethod", "auto_awq:AutoAWQMarlinLinearMethod")
    ),
    HostFact(
        f"{_QUANTIZATION}.utils.gptq_utils",
        ("get_linear_quant_method(config, layer, prefix, linear_method_cls)",),
        "reads",
        _CONFIGS,
        "It gives layers of a checkpoint their methods.",
        since="0.32",
    ),
    *(
        HostFact(
            f"{_SCHEMES}.{name}",
            ("process_weights_after_loading(layer)", kernel),
            "replaces",
            _CONFIGS,
            _ASKS,
            since="0.32",
        )
        for name, kernel in (
            ("compressed_tensors_w8a8_int8:CompressedTensorsW8A8Int8", "kernel"),
            ("compressed_tensors_wNa16:CompressedTensorsWNA16", "kernel"),
            ("compressed_tensors_w8a8_fp8:CompressedTensorsW8A8Fp8", "fp8_linear"),
            ("compressed_tensors_w8a16_fp8:CompressedTensorsW8A16Fp8", "linear_kernel"),
        )
    ),
    HostFact(
        f"{_SCHEMES}.compressed_tensors_wNa16:CompressedTensorsWNA16",
        ("use_batch_invariant",),
        "replaces",
        _CONFIGS,
        "Where batches are invariant, vLLM would unpack weights itself and have no kernel.",
        since="0.33",
    ),
    HostFact(
        f"{_LINEAR}.mixed_precision.MPLinearKernel:MPLinearLayerConfig",
        ("partition_weight_shape", "weight_type", "group_size", "zero_points"),
        "reads",
        "quantization.kernels",
        "What a layer asks of a kernel.",
        since="0.32",
    ),
    HostFact(
        f"{_LINEAR}.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearLayerConfig",
        ("weight_quant_key", "activation_quant_key", "input_dtype"),
        "reads",
        "quantization.kernels",
        "What a layer asks of a kernel.",
        since="0.32",
    ),
    *(
        HostFact(owner, _CONFIG, "overrides", _CONFIGS, _ASKS, since="0.32")
        for owner in (
            f"{_QUANTIZATION}.fp8:Fp8Config",
            f"{_QUANTIZATION}.auto_gptq:AutoGPTQConfig",
            f"{_QUANTIZATION}.auto_awq:AutoAWQConfig",
            _COMPRESSED,
        )
    ),
    HostFact(
        _COMPRESSED,
        ("get_scheme(layer, layer_name=None)",),
        "overrides",
        _CONFIGS,
        "A scheme's weights stay as they are loaded; others are refused.",
        since="0.32",
    ),
    HostFact(
        f"{_QUANTIZATION}.fp8:Fp8LinearMethod",
        ("process_weights_after_loading(layer)", "apply(layer, x, bias=None)"),
        "overrides",
        _CONFIGS,
        "Weights stay as they are loaded, so vLLM's own product of invariant batches does not know them.",
        since="0.32",
    ),
    *(
        HostFact(
            owner,
            (f"create_weights({_CREATE}{also})",),
            how,
            _CONFIGS,
            "vLLM counts blocks from the first row of merged layers, and refuses those that do not fit.",
            since="0.32",
        )
        for owner, how, also in _BLOCKS
    ),
    HostFact(
        "vllm.model_executor.layers.attention.attention:Attention",
        ("kv_cache_dtype",),
        "reads",
        _CONFIGS,
        "Scales of each head would become one of a layer.",
        since="0.32",
    ),
    HostFact(
        "vllm.model_executor.layers.linear:ColumnParallelLinear",
        ("allow_fp8_block_shape_mismatch",),
        "replaces",
        "quantization.blocks",
        "vLLM would refuse merged layers whose blocks do not fit.",
        since="0.32",
    ),
    HostFact(
        "vllm.model_executor.parameter:GroupQuantScaleParameter",
        ("weight_loader",),
        "reads",
        "quantization.blocks",
        "Scales of rows load as rows of the weight do.",
        since="0.32",
    ),
    HostFact(
        f"{_SCHEMES}.compressed_tensors_w8a8_int8:CompressedTensorsW8A8Int8",
        ("create_weights(layer, output_partition_sizes, **kwargs)",),
        "replaces",
        _CONFIGS,
        "vLLM keeps the last one of merged layers' scales of inputs.",
        since="0.32",
    ),
    HostFact(
        "vllm.model_executor.parameter:PerTensorScaleParameter",
        ("weight_loader",),
        "reads",
        _CONFIGS,
        "It has a scale for each of the merged layers.",
        since="0.32",
    ),
    HostFact(
        f"{_QUANTIZATION}.fp8:Fp8MoEMethod",
        ("weight_scale_refine",),
        "replaces",
        _EXPERTS,
        "vLLM would refuse experts whose last block is short.",
        since="0.32",
    ),
    HostFact(
        f"{_QUANTIZATION}.fp8:Fp8LinearMethod",
        ("use_marlin", "block_quant"),
        "replaces",
        _CONFIGS,
        "It says in which form latent attention finds a weight.",
        since="0.32",
    ),
    *(
        HostFact(
            owner,
            ("create_weights(layer, *args, **kwargs)", "process_weights_after_loading(layer)"),
            "overrides",
            _EXPERTS,
            "vLLM's class makes the parameters that its loader fills; what follows serves a kernel of CUDA's.",
            since="0.32",
        )
        for owner in (
            f"{_QUANTIZATION}.fp8:Fp8MoEMethod",
            f"{_QUANTIZATION}.auto_gptq:AutoGPTQMoEMethod",
            f"{_QUANTIZATION}.auto_awq:AutoAWQMoEMethod",
            f"{_COMPRESSED_MOE}.compressed_tensors_moe_w8a8_int8:CompressedTensorsW8A8Int8MoEMethod",
            f"{_COMPRESSED_MOE}.compressed_tensors_moe_w8a8_fp8:CompressedTensorsW8A8Fp8MoEMethod",
            f"{_COMPRESSED_MOE}.compressed_tensors_moe_wna16:CompressedTensorsWNA16MoEMethod",
        )
    ),
    HostFact(
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase",
        (
            "get_fused_moe_quant_config(layer)",
            "is_monolithic",
            "supports_eplb",
            "apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)",
        ),
        "overrides",
        _EXPERTS,
        "The modular kernel's experts are ours, and take rows that are not quantized.",
        since="0.32",
    ),
    HostFact(
        f"{_MOE}.oracle.unquantized",
        (
            "make_unquantized_moe_kernel(quant_config, moe_config, backend, experts_cls, routing_tables=None)",
            "UnquantizedMoeBackend",
        ),
        "reads",
        _EXPERTS,
        "The modular kernel around our experts.",
        since="0.32",
    ),
    HostFact(
        f"{_MOE}.routed_experts:RoutedExperts",
        ("_expert_routing_tables()", "_loaded_expert_biases"),
        "reads",
        _EXPERTS,
        "The modular kernel around our experts, and whether a checkpoint has biases.",
        since="0.32",
    ),
    HostFact(
        f"{_MOE}.routed_experts:RoutedExperts",
        ("ckpt_gate_proj_name", "ckpt_up_proj_name", "ckpt_down_proj_name", "moe_config"),
        "reads",
        _CONFIGS,
        "A checkpoint's names of an expert's products.",
        since="0.32",
    ),
    HostFact(
        f"{_MOE}.routed_experts:RoutedExperts",
        ("weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success=False)",),
        "reads",
        _CONFIGS,
        "Models with a loader of their own know vLLM's methods by name.",
        since="0.32",
    ),
    HostFact(
        f"{_MOE}.routed_experts:RoutedExperts",
        ("layer_name",),
        "reads",
        _EXPERTS,
        "The name of a layer that is refused.",
        since="0.32",
    ),
    HostFact(
        f"{_MOE}.config:FusedMoEConfig",
        ("tp_rank",),
        "reads",
        _EXPERTS,
        "The ranks that share an expert add what they compute, so one has the bias.",
        since="0.32",
    ),
    HostFact(
        f"{_QUANTIZATION}.compressed_tensors.transform.linear",
        ("get_linear_transform_schemes(layer, layer_name, transform_config, packed_modules_mapping)",),
        "reads",
        _CONFIGS,
        "Experts whose rows a checkpoint transforms are refused.",
        since="0.32",
    ),
    HostFact(
        f"{_QUANTIZATION}.auto_gptq",
        ("get_moe_quant_method(config, layer, prefix, moe_method_cls)",),
        "reads",
        _CONFIGS,
        "It gives experts of a checkpoint their method.",
        since="0.32",
    ),
    HostFact(
        f"{_QUANTIZATION}.utils.quant_utils",
        ("is_layer_skipped(prefix, ignored_layers, fused_mapping, *, match_mode)",),
        "reads",
        _CONFIGS,
        "Experts that a checkpoint leaves as they are.",
        since="0.32",
    ),
    HostFact(
        _COMPRESSED,
        (
            "get_scheme_dict(layer, layer_name=None)",
            "_add_fused_moe_to_target_scheme_map()",
            "_is_wNa16_group_channel(weight_quant, input_quant)",
            "transform_config",
        ),
        "reads",
        _CONFIGS,
        "The scheme of an expert's products.",
        since="0.32",
    ),
)

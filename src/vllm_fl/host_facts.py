"""Everything that this package relies on in vLLM and that vLLM may move: one table.

``make host-check VLLM=VERSION`` compares it with a version that nobody has installed, and a start on a version that was
not tested with the one that is. A name that is overridden or replaced and not listed here fails a test. The classes of
layers, whose forwards are ours, are rows of :mod:`vllm_fl.layers`.
"""

from __future__ import annotations

from fl_dispatch.devices.spec import GRAPH_NAMES, STREAM_NAMES
from fl_dispatch.hosting.host_facts import HostFact

from .compat import v0_26
from .runner_kernels import table as runner_kernels

_LAYERS = "vllm.model_executor.layers"
_MOE = f"{_LAYERS}.fused_moe"
_MLA = f"{_LAYERS}.attention.mla_attention"
_ROPE = f"{_LAYERS}.rotary_embedding"
_WORKER = "vllm.v1.worker"
_PUNICA = "vllm.lora.punica_wrapper"
_ATTENTION = "vllm.v1.attention.backend"
_PREFILL = "vllm.v1.attention.backends.mla.prefill"
_COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase"
_ATTENTION_CLASS = (
    "get_impl_cls()",
    "get_builder_cls()",
    "get_supported_kernel_block_sizes(kv_cache_spec=None)",
    "get_name()",
    "forward_includes_kv_cache_update",
    "supported_dtypes",
    "supported_kv_cache_dtypes",
)
_NO_LIBRARY = "On an out-of-tree platform it is a compiled operator of vLLM's, or raises."

READ = (
    HostFact(
        f"{_WORKER}.gpu_worker:Worker",
        ("_init_workspace_and_model_runner()",),
        "reads",
        "worker_cpu",
        "The rest of vLLM's init_device is for GPUs.",
        since="0.32",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker",
        ("init_worker_distributed_environment(vllm_config, rank, distributed_init_method, local_rank, backend)",),
        "reads",
        "worker_gpu",
        "The rest of vLLM's init_device is for devices that PyTorch calls cuda.",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker",
        ("init_worker_distributed_environment(vllm_config, rank, distributed_init_method, local_rank, backend)",),
        "reads",
        "worker_cpu",
        "The rest of vLLM's init_device is for GPUs.",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker:Worker",
        ("_init_workspace_and_model_runner()",),
        "reads",
        "worker_gpu",
        "The rest of vLLM's init_device is for devices that PyTorch calls cuda.",
        since="0.32",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker:Worker",
        ("init_snapshot", "requested_memory"),
        "reads",
        "worker_gpu",
        "vLLM measures the memory for the KV cache from them.",
    ),
    HostFact(
        "vllm.utils.mem_utils:MemorySnapshot",
        ("device",),
        "reads",
        "worker_gpu",
        "The memory of a device before the model is there.",
    ),
    HostFact(
        f"{_WORKER}.utils",
        ("request_memory(init_snapshot, cache_config, **kwargs)",),
        "reads",
        "worker_gpu",
        "The memory that a worker may use.",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker:Worker",
        ("use_v2_model_runner", "model_runner"),
        "reads",
        "compat.library",
        "Only the V1 runner has kernels to compile beforehand.",
    ),
    HostFact(
        "vllm.model_executor.warmup.jit_warmup",
        ("jit_warmup_registry",),
        "reads",
        "compat.library",
        "The kernels that the V1 runner's parts have registered.",
        since="0.32",
    ),
    HostFact(
        f"{_WORKER}.gpu_model_runner:GPUModelRunner",
        ("_dummy_run(num_tokens, *, force_attention=None, **kwargs)",),
        "reads",
        "worker_cpu",
        "The first batch, in which implementations prove themselves.",
    ),
    HostFact(
        f"{_WORKER}.gpu.model_runner:GPUModelRunner",
        ("_dummy_run",),
        "reads",
        "worker_gpu",
        "The first batches, in which implementations prove themselves.",
    ),
    HostFact(
        f"{_WORKER}.cpu_model_runner:CPUModelRunner",
        ("num_prompt_logprobs", "input_batch", "query_start_loc"),
        "reads",
        "lora",
        "They say whose logits vLLM asks for.",
    ),
    HostFact(
        f"{_PUNICA}.punica_base:PunicaWrapperBase",
        ("token_lora_indices", "sampler_indices"),
        "reads",
        "lora",
        "The adapter of each row.",
    ),
    HostFact(
        "vllm.model_executor.custom_op:CustomOp",
        ("_forward_method", "forward_native", "forward_oot"),
        "reads",
        "forwards",
        "Which forward a layer runs; set where ours does not fit.",
    ),
    HostFact(
        "vllm.model_executor.custom_op",
        ("op_registry_oot",),
        "reads",
        "layers",
        "The classes that take the place of vLLM's, by name.",
    ),
    HostFact(
        "vllm.model_executor.hw_agnostic.custom_op",
        ("op_registry_oot",),
        "reads",
        "layers",
        "The same for the layers behind VLLM_USE_HW_AGNOSTIC.",
        since="0.32",
    ),
    HostFact(
        f"{_LAYERS}.linear:UnquantizedLinearMethod",
        ("_gemm_impl",),
        "reads",
        "compat.layer_classes",
        "Whether a layer multiplies by PyTorch's own linear.",
        since="0.32",
    ),
    HostFact(
        f"{_LAYERS}.utils",
        ("default_unquantized_gemm",),
        "reads",
        "compat.layer_classes",
        "PyTorch's own linear, as vLLM calls it.",
    ),
    HostFact(
        f"{_LAYERS}.utils",
        ("dispatch_unquantized_gemm(linear_backend=None)",),
        "reads",
        "compat.layer_classes",
        "It chooses the product that makes logits, in every call.",
        since="0.32",
    ),
    HostFact(
        f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        ("apply(layer, x, bias=None)", "embedding(layer, input_)"),
        "replaces",
        "linear",
        "The product that makes logits would be vLLM's; an embedding that shares its weight would be Inductor's.",
    ),
    HostFact(
        f"{_ROPE}.base:RotaryEmbedding",
        ("_match_cos_sin_cache_dtype", "head_size", "is_neox_style"),
        "reads",
        "forwards",
        "The table of a rotation, and its form.",
    ),
    HostFact(
        f"{_ROPE}.phi3_long_rope_scaled_rope:Phi3LongRoPEScaledRotaryEmbedding",
        ("use_long_rope", "original_max_position_embeddings", "long_short_cos_sin_cache"),
        "reads",
        "forwards",
        "The two tables of a rotation.",
    ),
    HostFact(
        f"{_ROPE}.mrope:MRotaryEmbedding",
        ("mrope_section", "mrope_interleaved"),
        "reads",
        "forwards",
        "The axis by which each frequency turns.",
    ),
    HostFact(
        f"{_ROPE}.mrope_interleaved:MRotaryEmbeddingInterleaved",
        ("mrope_dim",),
        "reads",
        "forwards",
        "The axis by which each frequency turns.",
    ),
    HostFact(
        f"{_LAYERS}.layernorm:RMSNorm",
        ("weight", "variance_epsilon", "has_weight", "variance_size_override"),
        "reads",
        "forwards",
        "The operator's arguments.",
    ),
    HostFact(
        f"{_LAYERS}.layernorm:GemmaRMSNorm",
        ("weight", "variance_epsilon"),
        "reads",
        "forwards",
        "The operator's arguments.",
    ),
    HostFact(
        f"{_LAYERS}.layernorm:LayerNorm", ("weight", "bias", "eps"), "reads", "forwards", "The operator's arguments."
    ),
    HostFact(f"{_LAYERS}.activation:GeluAndMul", ("approximate",), "reads", "forwards", "The operator's argument."),
    HostFact(f"{_LAYERS}.activation:FatreluAndMul", ("threshold",), "reads", "forwards", "The operator's argument."),
    HostFact(
        f"{_LAYERS}.activation:SwigluOAIAndMul", ("alpha", "limit"), "reads", "forwards", "The operator's arguments."
    ),
    HostFact(
        f"{_LAYERS}.activation:SiluAndMulWithClamp",
        ("swiglu_limit", "alpha", "beta"),
        "reads",
        "forwards",
        "The operator's arguments.",
    ),
    HostFact(f"{_LAYERS}.activation:SwigluStepAndMul", ("limit",), "reads", "forwards", "The operator's argument."),
    HostFact(
        f"{_LAYERS}.activation:SituAndMul",
        ("beta", "linear_beta"),
        "reads",
        "forwards",
        "The operator's arguments.",
        since="0.32",
    ),
    HostFact(
        f"{_LAYERS}.activation:GeluAndMulSparse",
        ("std_multiplier", "approximate"),
        "reads",
        "forwards",
        "The operator's arguments.",
    ),
    HostFact(
        f"{_LAYERS}.activation:XIELU",
        ("alpha_p", "alpha_n", "_beta_scalar", "_eps_scalar"),
        "reads",
        "forwards",
        "The operator's arguments.",
    ),
    HostFact(
        f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        ("unquantized_backend", "experts_cls", "moe_kernel"),
        "reads",
        "moe",
        "vLLM builds its kernel around these experts, with the weights as they were loaded.",
    ),
    HostFact(
        f"{_MOE}.modular_kernel:FusedMoEExpertsModular",
        ("w1_bias", "w2_bias", "is_supported_config"),
        "reads",
        "experts",
        "The operator's arguments, and why experts are refused.",
    ),
    HostFact(
        f"{_MOE}.router.base_router:BaseRouter",
        ("capture_fn", "eplb_state", "top_k", "global_num_experts"),
        "reads",
        "routers",
        "A router of ours takes them over.",
    ),
    HostFact(
        f"{_MOE}.router.fused_topk_router:FusedTopKRouter",
        ("scoring_func", "renormalize"),
        "reads",
        "routers",
        "The operator's arguments.",
    ),
    HostFact(
        f"{_MOE}.router.fused_topk_bias_router:FusedTopKBiasRouter",
        (
            "scoring_func",
            "renormalize",
            "e_score_correction_bias",
            "_hash_indices_table",
            "bias_vl",
            "num_fused_shared_experts",
            "routed_scaling_factor",
        ),
        "reads",
        "routers",
        "The operator's arguments, and what no operator does.",
        since="0.32",
    ),
    HostFact(
        f"{_MOE}.router.grouped_topk_router:GroupedTopKRouter",
        (
            "num_expert_group",
            "topk_group",
            "renormalize",
            "scoring_func",
            "routed_scaling_factor",
            "e_score_correction_bias",
            "num_fused_shared_experts",
        ),
        "reads",
        "routers",
        "The operator's arguments, and what no operator does.",
    ),
    HostFact(
        f"{_MLA}:MLACommonImpl",
        ("_concat_k_nope_k_pe", "_use_flashinfer_concat_mla_k", "supports_quant_query_input"),
        "reads",
        "mla",
        "Keys are joined without compiled code.",
    ),
    HostFact(f"{_PREFILL}.base:MLAPrefillBackend", ("_prefill_metadata",), "reads", "mla_prefill", "The batch."),
    HostFact(
        "vllm.compilation.passes.pass_manager:PostGradPassManager",
        ("fix_functionalization",),
        "reads",
        "passes",
        "The pass that reads vLLM's compiled operators.",
    ),
    HostFact("vllm.compilation.decorators", ("do_not_compile",), "reads", "compile", "The first batches run eagerly."),
    HostFact(
        _COMMUNICATOR,
        ("use_all2all", "all2all_manager", "rank_in_group", "unique_name"),
        "reads",
        "distributed",
        "The exchange of tokens between experts.",
    ),
)

OVERRIDDEN = (
    HostFact(
        f"{_WORKER}.gpu_worker:Worker",
        ("load_model(*args, **kwargs)",),
        "overrides",
        "worker_cpu",
        "The model that is loaded is told which operators Inductor fuses better.",
    ),
    HostFact(
        f"{_ATTENTION}:AttentionBackend",
        ("get_preferred_block_size(default_block_size)",),
        "overrides",
        "attention",
        "The first choice for attention may take larger blocks than vLLM's usual ones.",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker:Worker",
        ("_maybe_get_memory_pool_context(tag)", "load_model(*args, **kwargs)"),
        "overrides",
        "worker",
        "Layers are bound after loading, and without sleep mode's memory pool.",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker:Worker",
        ("execute_model(scheduler_output)",),
        "overrides",
        "worker",
        "Behind the step's tokens all slots are padding; batches that vLLM makes up do not come this way.",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker:Worker",
        ("initialize_from_config(kv_cache_config)",),
        "overrides",
        "worker",
        "Groups of layers whose blocks would lie over each other are refused before there is a cache.",
    ),
    HostFact(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        ("kv_cache_groups",),
        "reads",
        "kv_layout",
        "The groups of layers that share memory.",
    ),
    HostFact(
        "vllm.v1.core.sched.output:SchedulerOutput",
        ("total_num_scheduled_tokens",),
        "reads",
        "worker",
        "The tokens of a step without padding.",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker:Worker",
        ("init_device()", "determine_available_memory()", "compile_or_warm_up_model()"),
        "overrides",
        "worker_cpu",
        "vLLM's are for GPUs.",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker:Worker",
        ("_make_model_runner()",),
        "overrides",
        "worker_cpu",
        "vLLM's runner is for GPUs.",
        since="0.32",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker:Worker",
        ("init_device()", "determine_available_memory()", "compile_or_warm_up_model()"),
        "overrides",
        "worker_gpu",
        "Choices are fixed between vLLM's steps.",
    ),
    HostFact(
        f"{_WORKER}.gpu_model_runner:GPUModelRunner",
        ("_get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)",),
        "overrides",
        "lora",
        "vLLM asks for logits without saying whose they are.",
    ),
    HostFact(
        f"{_PUNICA}.punica_cpu:PunicaWrapperCPU",
        (
            "add_shrink(y, x, *args, **kwargs)",
            "add_lora_embedding(y, x, *args, **kwargs)",
            "add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs)",
        ),
        "overrides",
        "lora",
        "vLLM takes the last adapter for a token without one.",
    ),
    HostFact(
        f"{_LAYERS}.linear:UnquantizedLinearMethod",
        ("apply(layer, x, bias=None)",),
        "replaces",
        "linear",
        "A linear layer's product would be vLLM's; the method itself stays, because vLLM asks for its class.",
    ),
    HostFact(
        f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        ("_init_moe_kernel(layer)",),
        "overrides",
        "moe",
        "The experts of a kernel that vLLM builds again would have no operator.",
        since="0.32",
    ),
    HostFact(
        f"{_MOE}.modular_kernel:FusedMoEExpertsModular",
        (
            "activation_format()",
            "_supports_current_device()",
            "_supports_no_act_and_mul()",
            "_supports_activation(activation)",
            "_supports_quant_scheme(weight_key, activation_key)",
            "_supports_parallel_config(moe_parallel_config)",
            "_supports_batch_invariance()",
            "workspace_shapes(M, N, K, *args, **kwargs)",
            "finalize_weight_and_reduce_impl()",
            (
                "apply(*, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, "
                "expert_map, apply_router_weight_on_input, **kwargs)"
            ),
        ),
        "overrides",
        "experts",
        "vLLM has no experts for an out-of-tree platform.",
    ),
    HostFact(
        f"{_MOE}.router.base_router:BaseRouter",
        (
            "_compute_routing(hidden_states, router_logits, indices_type, *, input_ids=None)",
            "routing_method_type",
        ),
        "overrides",
        "routers",
        "Most of vLLM's routers call compiled code.",
    ),
    HostFact(
        f"{_ATTENTION}:AttentionMetadataBuilder",
        ("_cudagraph_support", "build(common_prefix_len, common_attn_metadata, fast_build=None)"),
        "overrides",
        "attention_metadata",
        "A batch as the operators need it.",
    ),
    HostFact(
        f"{_ATTENTION}:CommonAttentionMetadata",
        ("query_start_loc_cpu", "seq_lens_cpu_upper_bound"),
        "reads",
        "attention_metadata",
        "A batch's lengths as integers of the host; exact without speculation and without fast prefill.",
    ),
    HostFact(
        "vllm.config.cache:CacheConfig",
        ("kv_sharing_fast_prefill",),
        "reads",
        "attention_metadata",
        "Such a batch's lengths are still being copied from the device when attention reads them.",
    ),
    HostFact(
        f"{_ATTENTION}:AttentionImpl",
        (
            (
                "forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, "
                "output_block_scale=None)"
            ),
        ),
        "overrides",
        "attention",
        "A layer's attention is the operator.",
    ),
    HostFact(
        f"{_ATTENTION}:AttentionBackend",
        (*_ATTENTION_CLASS, "supports_sliding_window()", "supports_attn_type(attn_type)", "supports_sink()"),
        "overrides",
        "attention",
        "What our attention class can do.",
    ),
    HostFact(
        f"{_ATTENTION}:AttentionBackend",
        ("supported_kv_cache_layouts()",),
        "overrides",
        "compat.attention_class",
        "The layout of the cache that the policy's implementation reads.",
        since="0.32",
    ),
    HostFact(
        f"{_MLA}:MLACommonImpl",
        (
            "fused_output_quant_supported(quant_key)",
            "forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)",
            "forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None)",
            "do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale=None)",
        ),
        "overrides",
        "mla",
        "A layer's latent attention is three operators.",
    ),
    HostFact(
        f"{_MLA}:MLACommonBackend",
        (*_ATTENTION_CLASS, "get_supported_head_sizes()"),
        "overrides",
        "mla",
        "What our class for latent attention can do.",
    ),
    HostFact(
        f"{_MLA}:MLACommonBackend",
        ("supported_kv_cache_layouts()",),
        "overrides",
        "mla",
        "The layout of the latent cache.",
        since="0.32",
    ),
    HostFact(
        f"{_MLA}:MLACommonMetadata",
        ("__post_init__()",),
        "overrides",
        "mla_metadata",
        "vLLM checks that a kernel of its own was compiled for this head size.",
    ),
    HostFact(
        f"{_MLA}:MLACommonMetadataBuilder",
        (
            "_cudagraph_support",
            "query_len_support",
            "build(common_prefix_len, common_attn_metadata, fast_build=None)",
        ),
        "overrides",
        "mla_metadata",
        "Requests with several new tokens may be decoded, and captured.",
    ),
    HostFact(
        f"{_MLA}:MLACommonMetadataBuilder",
        (
            (
                "_build_decode(block_table_tensor, seq_lens_device, max_seq_len, query_start_loc_cpu, "
                "query_start_loc_device, num_decode_tokens, max_query_len, dcp_tot_seq_lens_device)"
            ),
        ),
        "overrides",
        "mla_metadata",
        "The operator needs to know where each request starts.",
        since="0.32",
    ),
    HostFact(
        f"{_PREFILL}.base:MLAPrefillBackend",
        (
            "supported_dtypes",
            "get_name()",
            "run_prefill_new_tokens(q, k, v, return_softmax_lse, out=None, output_scale=None)",
        ),
        "overrides",
        "mla_prefill",
        "The prefill of a vendor's class for latent attention.",
    ),
    HostFact(
        f"{_PREFILL}.base:MLAPrefillBackend",
        ("run_prefill_context_chunk(chunk, q, k, v, out=None)",),
        "overrides",
        "mla_prefill",
        "The prefill of a vendor's class for latent attention.",
        since="0.32",
    ),
    HostFact(
        "vllm.compilation.passes.pass_manager:PostGradPassManager",
        ("configure(config)",),
        "overrides",
        "passes",
        "One of vLLM's passes reads its compiled operators.",
    ),
    HostFact(
        _COMMUNICATOR,
        (
            "all_reduce(input_)",
            "reduce_scatter(input_, dim=None)",
            "reduce_scatterv(input_, dim=None, sizes=None)",
            "all_gather(input_, dim=None)",
            "all_gatherv(input_, dim=None, sizes=None)",
            "broadcast(tensor, src=None)",
            "send(tensor, dst=None)",
            "recv(size, dtype, src=None)",
            "dispatch_router_logits(hidden_states, router_logits, *args, **kwargs)",
            "dispatch(hidden_states, topk_weights, topk_ids, *args, **kwargs)",
            "combine(hidden_states, is_sequence_parallel=None)",
            "destroy()",
        ),
        "overrides",
        "distributed",
        "The collectives of the device's own library.",
    ),
    HostFact(
        "vllm.platforms.interface:Platform",
        (
            "_enum",
            "device_name",
            "device_type",
            "dispatch_key",
            "dist_backend",
            "ray_device_key",
            "device_control_env_var",
            "simple_compile_backend",
            "additional_env_vars",
            "get_attn_backend_cls(selected_backend, attn_selector_config, num_heads=None)",
            "pre_register_and_update(parser=None)",
            "apply_config_platform_defaults(vllm_config)",
            "check_and_update_config(vllm_config)",
            "get_device_name(device_id=None)",
            "get_device_total_memory(device_id=None)",
            "get_current_memory_usage(device=None)",
            "get_device_capability(device_id=None)",
            "set_device(device)",
            "manual_seed_all(seed)",
            "is_pin_memory_available()",
            "num_compute_units(device_id=None)",
            "check_if_supports_dtype(dtype)",
            "import_kernels()",
            "support_hybrid_kv_cache()",
            "opaque_attention_op()",
            "support_static_graph_mode()",
            "get_static_graph_wrapper_cls()",
            "use_custom_op_collectives()",
            "get_compile_backend()",
            "get_pass_manager_cls()",
            "get_device_communicator_cls()",
            "get_punica_wrapper()",
            "verify_quantization(quant)",
        ),
        "overrides",
        "platform",
        "vLLM asks the platform.",
    ),
    HostFact(
        "vllm.platforms.interface:Platform",
        ("register_triton_kernel_overrides()", "get_mla_prefill_backend_cls(mla_selector_config)"),
        "overrides",
        "platform",
        "Kernels without a Triton driver, and the prefill of latent attention.",
        since="0.32",
    ),
)

REPLACED = (
    HostFact(
        "torch.cuda",
        (*STREAM_NAMES, *GRAPH_NAMES),
        "replaces",
        "compat.streams",
        "vLLM's model runners take streams, events and graphs from there, whatever the device's module is.",
    ),
    HostFact(
        "vllm.envs",
        ("environment_variables",),
        "replaces",
        "compat.detection",
        "vLLM warns about unknown VLLM_* variables, or refuses them with --fail-on-environ-validation; ours are added.",
    ),
    HostFact(
        "torch.accelerator",
        ("empty_cache", "empty_host_cache", "synchronize"),
        "replaces",
        "compat.accelerator",
        "vLLM calls them between steps and at shutdown; without an accelerator they raise.",
    ),
    HostFact(
        "vllm.v1.metrics.prometheus",
        ("get_prometheus_registry()",),
        "replaces",
        "compat.metrics",
        "vLLM makes the registry behind /metrics itself, and has no place where a plugin could name a collector.",
    ),
    HostFact(
        "vllm.entrypoints.serve.instrumentator.metrics",
        ("get_prometheus_registry",),
        "replaces",
        "compat.metrics",
        "It may have taken that function by name before the plugin is loaded.",
    ),
    HostFact(
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher",
        ("keys_initialized",),
        "replaces",
        "eager_steps",
        "The V1 runner then finds no graph, so that one step in N makes calls.",
    ),
    HostFact(
        f"{_WORKER}.gpu.cudagraph_utils:CudaGraphManager",
        ("_graphs_captured",),
        "replaces",
        "eager_steps",
        "The same for the V2 runner.",
    ),
    HostFact(
        "vllm.config.vllm",
        ("HAS_TRITON",),
        "replaces",
        "compat.model_runner",
        "The V2 model runner is written in Triton; vLLM takes it where Triton has a driver, we where there are forms.",
    ),
    HostFact(
        "vllm.config.vllm:VllmConfig",
        ("_get_v2_model_runner_unsupported_features()",),
        "replaces",
        "compat.model_runner",
        "It names what the V2 runner cannot do; features whose kernels have no PyTorch form are added.",
        since="0.32",
    ),
    HostFact(
        f"{_WORKER}.cpu.shm",
        (),
        "reads",
        "compat.model_runner",
        "It gives the V2 runner streams, events and pinned memory that do nothing, where main memory is the device.",
        since="0.32",
    ),
    HostFact(
        f"{_WORKER}.gpu.buffer_utils",
        ("is_uva_available",),
        "replaces",
        "compat.model_runner",
        "Whether the device reads main memory: always where it is the device, never on a chip that is not CUDA's.",
        since="0.32",
    ),
    HostFact(
        f"{_WORKER}.gpu.spec_decode.ngram.speculator",
        ("HAS_TRITON",),
        "replaces",
        "runner_kernels.table",
        "The look-up of drafts refuses to be made without Triton; its kernels have forms.",
        since="0.32",
    ),
    HostFact(
        f"{_WORKER}.gpu.sample.prompt_logprob:PromptLogprobsWorker",
        (
            "compute_prompt_logprobs(logits_fn, hidden_states, *args, **kwargs)",
            "compute_prompt_token_id_logprobs(logits_fn, hidden_states, *args, **kwargs)",
        ),
        "replaces",
        "lora",
        "vLLM asks for the logits of prompts without saying whose they are.",
        since="0.32",
    ),
    HostFact(
        f"{_WORKER}.gpu.model_runner:GPUModelRunner",
        ("prompt_logprobs_worker",),
        "reads",
        "lora",
        "It asks for the logits of prompts.",
        since="0.32",
    ),
    HostFact(
        f"{_WORKER}.gpu.block_table:BlockTables",
        ("_make_ptr_tensor(x)",),
        "replaces",
        "runner_kernels.table",
        "Kernels get tables by address; our forms get the tensors themselves.",
        since="0.32",
    ),
    *(
        HostFact(
            f"{runner_kernels.RUNNER}.{module}",
            names,
            "replaces",
            "runner_kernels.table",
            "A Triton kernel of the V2 model runner; devices without a Triton driver run its PyTorch form.",
            since="0.32",
        )
        for module, names in runner_kernels.by_module().items()
    ),
    HostFact(
        f"{_WORKER}.block_table:ComputeSlotMappingKernel",
        ("kernel",),
        "replaces",
        "compat.kernels",
        "A Triton kernel; there is no Triton driver on a CPU. Replaced through vLLM's own register_kernels.",
        since="0.32",
    ),
    HostFact(
        "vllm.triton_utils.dispatcher",
        ("register_kernels", "KernelOverride"),
        "reads",
        "compat.kernels",
        "Triton kernels are replaced by name through it.",
        since="0.32",
    ),
    HostFact(
        "vllm.v1.sample.rejection_sampler",
        (
            (
                "rejection_greedy_sample_kernel(output_token_ids_ptr, cu_num_draft_tokens_ptr, draft_token_ids_ptr, "
                "target_argmax_ptr, bonus_token_ids_ptr, is_greedy_ptr, max_spec_len, uniform_probs_ptr, "
                "synthetic_conditional_rates_ptr, SYNTHETIC_MODE)"
            ),
            (
                "rejection_random_sample_kernel(output_token_ids_ptr, cu_num_draft_tokens_ptr, draft_token_ids_ptr, "
                "draft_probs_ptr, target_probs_ptr, bonus_token_ids_ptr, recovered_token_ids_ptr, uniform_probs_ptr, "
                "is_greedy_ptr, max_spec_len, vocab_size, synthetic_conditional_rates_ptr, NO_DRAFT_PROBS, "
                "SYNTHETIC_MODE)"
            ),
            "expand_kernel(output_ptr, input_ptr, cu_num_tokens_ptr, replace_from, replace_to, *_)",
            (
                "sample_recovered_tokens_kernel(output_token_ids_ptr, cu_num_draft_tokens_ptr, draft_token_ids_ptr, "
                "draft_probs_ptr, target_probs_ptr, inv_q_ptr, *_)"
            ),
        ),
        "replaces",
        "compat.kernels",
        "Triton kernels for speculative decoding.",
    ),
    HostFact(
        f"{_WORKER}.gpu.buffer_utils",
        ("get_accelerator_view_from_cpu_tensor(cpu_tensor)",),
        "replaces",
        "compat.library",
        f"The V2 model runner's buffers in host memory need it. {_NO_LIBRARY}",
    ),
    HostFact(
        "vllm.utils.torch_utils",
        ("weak_ref_tensor(tensor)",),
        "replaces",
        "compat.library",
        f"Captured graphs keep their results by it. {_NO_LIBRARY}",
    ),
    HostFact(
        f"{_WORKER}.gpu_worker",
        ("kernel_warmup(worker, *, process_local_only=None)",),
        "replaces",
        "compat.library",
        "It imports fusion passes that read vLLM's compiled operators, for kernels of libraries that do not run here.",
    ),
    HostFact(
        "vllm.distributed.parallel_state:GroupCoordinator",
        ("graph_capture(*args, **kwargs)",),
        "replaces",
        "compat.library",
        "It asserts that a group's communicator is vLLM's own for CUDA or XPU, so no graph of several ranks could be "
        "captured.",
    ),
    HostFact(
        _ROPE,
        ("Phi3LongRoPEScaledRotaryEmbedding",),
        "replaces",
        "layers",
        "A plain module, which vLLM's CustomOp.register_oot does not replace; get_rope looks it up under this name.",
    ),
)

FACTS = (*READ, *OVERRIDDEN, *REPLACED, *v0_26.FACTS)

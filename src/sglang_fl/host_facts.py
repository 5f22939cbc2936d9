"""Everything that this package relies on in SGLang and that SGLang may move: one table.

``make host-check SGLANG=VERSION`` compares it with a version that nobody has installed, and a start on a version that
was not tested with the one that is. The hooks of :mod:`sglang_fl.compat.hooked` take their reasons from here. The
classes of layers, whose forwards are ours, are rows of :mod:`sglang_fl.bridge`.
"""

from __future__ import annotations

from fl_dispatch.hosting.host_facts import HostFact

from .quantization.facts import FACTS as QUANTIZATION
from .quantization.updates import ANSWERS
from .speculation import facts as speculation

RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
LOADER = "sglang.srt.model_loader.loader:DefaultModelLoader"
FUSED_OP = "sglang.kernels.fused_op:BaseFusedOp"
OLDER_OP = "sglang.srt.layers.utils.multi_platform:MultiPlatformOp"
ADAPTERS = "sglang.srt.lora.lora_manager:LoRAManager"
DECODE_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner"
PROMPT_GRAPHS = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner"
BATCH = "sglang.srt.model_executor.forward_batch_info:ForwardBatch"
DUAL_PRODUCT = "sglang.srt.layers.dual_gemm:DualGemm"
NORMS = "sglang.kernels.ops.layernorm.norm"
LATENT = "sglang.srt.models.deepseek_common.deepseek_weight_loader:DeepseekV2WeightLoaderMixin"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
GROUP = "sglang.srt.distributed.parallel_state:GroupCoordinator"
SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_LAYERS = "sglang.srt.layers"
_PLATFORM = "sglang.srt.platforms.interface:SRTPlatform"
_LIBRARY = "the library that the device's spec or FLAGCX_PATH names would not be asked"
_VARIABLE = "SGLang has parts of different sizes through NCCL only"
_CUSTOM_OP = "SGLang calls an operator that is registered for its own devices only"

HOOKED = (
    HostFact(
        FUSED_OP,
        ("_resolve_forward_method()",),
        "replaces",
        "layers.classes",
        "layers would run SGLang's own code",
        since="0.5.20",
    ),
    HostFact(
        OLDER_OP,
        ("dispatch_forward()",),
        "replaces",
        "layers.classes",
        "layers would run SGLang's own code",
        until="0.5.20",
    ),
    HostFact(
        "sglang.kernels.fused_op",
        ("set_fused_op_backend(backend)",),
        "replaces",
        "compat.backend_choice",
        "a backend that is forced for all layers would run in the place of what our reports name",
        since="0.5.20",
    ),
    HostFact(
        RUNNER, ("load_model(*args, **kwargs)",), "replaces", "worker.runner", "layers would not know their prefix"
    ),
    HostFact(
        LOADER,
        ("load_weights_only(model, weights, target_device)", "_prepare_weights(*args, **kwargs)"),
        "replaces",
        "checkpoint",
        "weights that no tensor of the checkpoint fills would be served",
    ),
    HostFact(
        RUNNER, ("init_lora_manager()",), "replaces", "layers.lora", "SGLang pins the memory of adapters without asking"
    ),
    HostFact(
        ADAPTERS,
        ("validate_new_adapter(lora_config, lora_ref)",),
        "replaces",
        "layers.lora",
        "SGLang would serve adapters wrongly whose options it does not read",
    ),
    HostFact(
        RUNNER,
        ("forward(forward_batch, *args, **kwargs)",),
        "replaces",
        "worker.runner",
        "nobody would see that an operator is never dispatched",
    ),
    HostFact(
        SCHEDULER,
        ("init_req_max_new_tokens(req)",),
        "replaces",
        "layers.rotations",
        "a prompt of several steps would be turned by both tables of LongRoPE",
        since="0.5.23",
    ),
    HostFact(
        PROMPT_GRAPHS,
        ("capture()", "can_run_graph(forward_batch)", "execute(*args, **kwargs)"),
        "replaces",
        "graphs.prompts",
        "graphs of prompts would hold choices that have proven nothing and may change",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.utils.common",
        ("support_triton(backend)",),
        "replaces",
        "compat.hooked",
        "SGLang starts Triton kernels for every attention backend that it does not know; 0.5.23 asks the platform",
    ),
    HostFact(
        "sglang.srt.utils.common",
        ("add_prometheus_middleware(app)",),
        "replaces",
        "worker.metrics",
        "/metrics would not say what the workers run, because SGLang has no place for a collector",
    ),
    HostFact(
        "sglang.srt.mem_cache.allocation",
        ("get_last_loc(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)",),
        "replaces",
        "compat.hooked",
        "SGLang starts a Triton kernel for every attention backend that it does not know",
    ),
    HostFact(
        f"{_LAYERS}.logits_processor",
        ("fused_softcap(full_logits, final_logit_softcapping)",),
        "replaces",
        "compat.hooked",
        "SGLang starts a Triton kernel for the logits of models with a soft cap",
    ),
    HostFact(
        "sglang.srt.configs.update_config",
        ("adjust_config_with_unaligned_cpu_tp(model_config, load_config, tp_size)",),
        "replaces",
        "compat.hooked",
        (
            "on a CPU SGLang would enlarge layers for kernels that it does not run here, and leave the memory of "
            "experts' additional columns as it found it"
        ),
    ),
    HostFact(
        "sglang.srt.models.utils",
        ("enable_fused_set_kv_buffer(forward_batch)",),
        "replaces",
        "compat.native_kernels",
        "on NVIDIA GPUs SGLang rotates and writes the cache in one kernel, so two operators would never be called",
    ),
    HostFact(
        NORMS,
        ("can_use_fused_inplace_qknorm(head_dim, dtype)",),
        "replaces",
        "compat.native_kernels",
        "on NVIDIA GPUs SGLang computes the norms of queries and keys in one kernel, so no operator would be called",
        since="0.5.20",
    ),
    HostFact(
        DUAL_PRODUCT,
        ("_select_mode(gate_up_proj, hidden_size)",),
        "replaces",
        "compat.native_kernels",
        "on NVIDIA GPUs SGLang multiplies and activates in one kernel, so no operator would be called",
        since="0.5.22",
    ),
    HostFact(
        BATCH,
        ("prepare_mlp_sync_batch(model_runner)",),
        "replaces",
        "worker.data_parallel",
        "SGLang pins memory for data-parallel attention without asking",
    ),
    HostFact(
        f"{_LAYERS}.dp_attention",
        ("memcpy(dst, src, dim, offset, sz, offset_src)",),
        "replaces",
        "worker.data_parallel",
        "SGLang copies tokens of data-parallel attention by a Triton kernel",
    ),
    HostFact(
        GROUP,
        ("__init__(*args, **kwargs)",),
        "replaces",
        "worker.communicator",
        "the ranks of a group would not be connected",
    ),
    HostFact(
        GROUP,
        ("destroy()",),
        "replaces",
        "worker.communicator",
        "what a library holds for a group would not be given back",
    ),
    HostFact(
        GROUP,
        (
            "all_reduce(input_)",
            "reduce_scatter(output, input_list)",
            "all_gather(input_, dim=None, output_tensor_list=None)",
            "broadcast(input_, src=None)",
            "send(tensor, dst=None)",
            "recv(size, dtype, src=None)",
        ),
        "replaces",
        "worker.communicator",
        _LIBRARY,
    ),
    HostFact(
        GROUP,
        ("reduce_scatter_tensor(output, input)", "all_gather_into_tensor(output, input)"),
        "replaces",
        "worker.communicator",
        _CUSTOM_OP,
    ),
    HostFact(
        GROUP,
        ("reduce_scatterv(input_, output=None, sizes=None)", "all_gatherv(input_, sizes=None, output=None)"),
        "replaces",
        "worker.communicator",
        _VARIABLE,
    ),
    HostFact(
        LATENT,
        ("post_load_weights(is_nextn=False, weight_names=None)",),
        "replaces",
        "quantization.latent",
        "SGLang would split a quantized weight of latent attention by code for the formats of its own kernels",
        since="0.5.23",
    ),
    HostFact(
        UPDATER,
        tuple(f"{way}(recv_req)" for way in ANSWERS),
        "replaces",
        "quantization.updates",
        "SGLang would write new weights over quantized ones that are in another form by then",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.model_loader.weight_utils",
        ("maybe_remap_kv_scale_name(name, params_dict)",),
        "replaces",
        "quantization.cache",
        "SGLang drops scales of a cache that have its own name for them",
        since="0.5.23",
    ),
    HostFact(
        RUNNER,
        ("check_quantized_moe_compatibility()",),
        "replaces",
        "quantization",
        "SGLang refuses experts in blocks of fp8 whose last block is short",
        since="0.5.23",
    ),
    *speculation.HOOKED,
)

READ = (
    HostFact(
        f"{_LAYERS}.linear:LinearBase", ("quant_method",), "reads", "layers.linear", "A layer asks it for its product."
    ),
    HostFact(
        f"{_LAYERS}.quantization.unquant:UnquantizedLinearMethod",
        ("apply(layer, x, bias=None)",),
        "replaces",
        "layers.linear",
        "Products would run SGLang's own code.",
    ),
    HostFact(
        "sglang.srt.utils.common",
        ("use_intel_amx_backend(layer)",),
        "reads",
        "layers.linear",
        "A weight that SGLang has packed would be multiplied by as if it were not.",
    ),
    HostFact(
        f"{_LAYERS}.quantization.unquant",
        ("get_bf16_gemm_backend()",),
        "reads",
        "layers.linear",
        "The report has SGLang's choice of a kernel beside ours.",
    ),
    HostFact(
        ADAPTERS,
        ("fetch_new_loras", "load_lora_adapter", "load_lora_adapter_from_tensors", "prepare_lora_batch"),
        "reads",
        "layers.lora",
        "They pin memory.",
    ),
    HostFact(
        f"{_LAYERS}.dp_attention",
        ("memcpy_cpu(dst, src, dim, offset, sz, offset_src)",),
        "reads",
        "worker.data_parallel",
        "The same without a Triton kernel.",
    ),
    HostFact(
        "sglang.srt.lora.lora_config:LoRAConfig", ("hf_config",), "reads", "layers.lora", "What an adapter asks for."
    ),
    HostFact(
        "sglang.srt.lora.backend.torch_backend:TorchNativeLoRABackend",
        ("name",),
        "reads",
        "layers.lora",
        "The one in PyTorch.",
    ),
    HostFact(
        "sglang.srt.layers.moe.fused_moe_triton.layer",
        ("FusedMoE",),
        "reads",
        "layers.lora",
        "Its adapters are in Triton.",
    ),
    HostFact(
        "sglang.srt.utils.common",
        ("is_npu()",),
        "reads",
        "compat.device_branches",
        "The plugin answers no, else SGLang's own code for Ascend NPUs runs: it needs sgl_kernel_npu, and no platform.",
    ),
    HostFact(
        "sglang.srt.utils.common",
        ("is_cuda()",),
        "reads",
        "bridge.mixture",
        "Some blocks scale the sum of their experts only where it says no.",
    ),
    HostFact(
        "sglang.srt.environ:Envs",
        ("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED",),
        "reads",
        "platform.config",
        "It is refused, because it lays experts' weights out in another order.",
        since="0.5.20",
    ),
    HostFact(
        "sglang.srt.plugins.hook_registry:HookRegistry",
        ("_hooks", "_patched", "register"),
        "reads",
        "compat.hooks",
        "Which hooks are registered, and which SGLang has applied.",
    ),
    HostFact(
        "sglang.srt.runtime_context",
        ("get_parallel()", "get_schedule()"),
        "reads",
        "worker.runner",
        "Ranks, and the sizes of steps for the record of a run.",
    ),
    HostFact(
        "sglang.srt.environ:Envs",
        ("SGLANG_FORCE_FUSED_OP_BACKEND",),
        "reads",
        "platform.startup",
        "It is refused, because it goes around what we hook.",
        since="0.5.20",
    ),
    HostFact(
        FUSED_OP,
        ("forward(*args, backend=None, **kwargs)", "forward_native(*args, **kwargs)"),
        "replaces",
        "compat.backend_choice",
        "On instances: an argument, or a model that calls forward_native itself, would go around what we hook.",
        since="0.5.20",
    ),
    HostFact(
        FUSED_OP,
        ("_forward_method",),
        "reads",
        "layers.classes",
        "The forward that a layer runs.",
        since="0.5.20",
    ),
    HostFact(
        "sglang.srt.mem_cache.allocation",
        ("get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)",),
        "reads",
        "compat.hooked",
        "The same without a Triton kernel.",
    ),
    HostFact(
        "sglang.srt.arg_groups.choices",
        ("add_attention_backend_choices",),
        "reads",
        "compat.hooked",
        "Users may name our attention backend.",
    ),
    HostFact(
        f"{_LAYERS}.attention.attention_registry",
        ("register_attention_backend",),
        "reads",
        "compat.hooked",
        "SGLang makes our attention backend.",
    ),
    HostFact(
        "sglang.srt.models.deepseek_common.attention_backend_handler:AttentionBackendRegistry",
        ("register",),
        "reads",
        "compat.hooked",
        "DeepSeek's layers ask each backend for the form of latent attention.",
    ),
    HostFact(
        "sglang.srt.managers.scheduler:Scheduler",
        ("tp_worker",),
        "reads",
        "report",
        "A scheduler answers what runs in it.",
    ),
    HostFact(
        "sglang.srt.mem_cache.allocator.paged",
        ("alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, device)",),
        "reads",
        "attention.pools",
        "Slots of pages without a Triton kernel.",
    ),
    HostFact(
        "sglang.srt.hardware_backend.npu.utils",
        ("set_default_server_args(args)",),
        "reads",
        "platform.config",
        "It chooses the attention backend of the device's host_attention before the plugin is asked.",
    ),
    HostFact(
        "sglang.srt.arg_groups.platform_hook",
        ("handle_cpu_backends(server_args)",),
        "reads",
        "platform.config",
        "It chooses the attention backend of the device's host_attention before the plugin is asked.",
    ),
    HostFact(
        "sglang.srt.model_executor.cuda_graph_config",
        ("Backend", "Phase", "with_phase(config, phase, **changes)"),
        "reads",
        "platform.config",
        "The plugin is asked when the flags about graphs are this configuration already.",
    ),
    HostFact(
        DECODE_GRAPHS,
        ("capture_bs", "max_bs", "buffers", "attn_backend", "seq_len_fill_value"),
        "reads",
        "graphs.decode",
        "Batches of every size before graphs are captured, and which those are.",
        since="0.5.20",
    ),
    HostFact(
        "sglang.srt.model_executor.runner.base_runner:BaseRunner",
        ("_dummy_run", "_widest_decode_rows", "_alloc_dummy_decode_buffers"),
        "reads",
        "graphs.choices",
        "Batches that decode before graphs are captured.",
        since="0.5.20",
    ),
    HostFact(
        "sglang.srt.model_executor.runner.base_runner:BaseRunner",
        ("model_context",),
        "reads",
        "graphs.choices",
        "A router reads there whether its shared experts are among the others.",
        since="0.5.22",
    ),
    HostFact(
        PROMPT_GRAPHS,
        ("_run_dummy_forward", "capture_num_tokens", "max_num_tokens", "layer_model"),
        "reads",
        "graphs.prompts",
        "Prompts of every length before graphs are captured, and which those are.",
        since="0.5.20",
    ),
    HostFact(
        f"{_LAYERS}.radix_attention:RadixAttention",
        ("_eager_attention",),
        "reads",
        "graphs.prompts",
        "Between pieces of a graph it calls attention for the tokens that are no padding.",
        since="0.5.22",
    ),
    HostFact(
        UPDATER,
        ("_select_runners(selector='all')",),
        "reads",
        "quantization.updates",
        "The models that new weights would go to.",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.managers.io_struct",
        tuple(ANSWERS.values()),
        "reads",
        "quantization.updates",
        "A refusal is an answer of SGLang's.",
        since="0.5.23",
    ),
    HostFact(
        RUNNER,
        ("decode_cuda_graph_runner", "prefill_cuda_graph_runner"),
        "reads",
        "report",
        "The report counts replays.",
    ),
)

OVERRIDDEN = (
    HostFact(
        f"{_LAYERS}.attention.base_attn_backend:AttentionBackend",
        (
            "init_forward_metadata(forward_batch)",
            "init_forward_metadata_out_graph(forward_batch, in_capture=None)",
            "init_cuda_graph_state(max_bs, max_num_tokens)",
            "forward_extend(q, k, v, layer, forward_batch, save_kv_cache=None, sinks=None, **unknown)",
            "forward_decode(q, k, v, layer, forward_batch, save_kv_cache=None, sinks=None, **unknown)",
            "support_triton()",
            "get_cuda_graph_seq_len_fill_value()",
        ),
        "overrides",
        "attention.attention_backend",
        "Attention is our operators.",
    ),
    HostFact(
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
        ("_create_buffers_normal()",),
        "overrides",
        "attention.pools",
        "Keys and values lie as the policy's implementation reads them.",
    ),
    HostFact(
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
        ("_kv_tokens_per_row()",),
        "overrides",
        "attention.pools",
        "SGLang refuses a cache whose first axis is pages where it expects tokens.",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
        ("k_buffer", "v_buffer", "store_dtype", "layer_num", "head_num", "head_dim", "v_head_dim"),
        "reads",
        "attention.pools",
        "What a layer's keys and values are, and where SGLang looks for them.",
    ),
    HostFact(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator",
        (
            (
                "alloc_extend(prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, "
                "num_new_pages=None)"
            ),
            "alloc_decode(seq_lens, seq_lens_cpu, last_loc)",
        ),
        "overrides",
        "attention.pools",
        "SGLang's are Triton kernels.",
    ),
    HostFact(
        _PLATFORM,
        (
            "_enum",
            "device_name",
            "device_type",
            "supported_quantization",
            "get_device(device_id=None)",
            "set_device(device)",
            "get_device_name(device_id=None)",
            "get_device_uuid(device_id=None)",
            "get_device_capability(device_id=None)",
            "get_device_total_memory(device_id=None)",
            "get_available_memory(device_id=None)",
            "get_current_memory_usage(device=None)",
            "is_pin_memory_available(device=None)",
            "synchronize()",
            "empty_cache()",
            "get_torch_distributed_backend_str()",
            "get_torch_profiler_activity_str()",
            "get_torch_profiler_activity()",
            "get_dispatch_key_name()",
            "get_default_attention_backend()",
            "get_paged_allocator_cls()",
            "get_quantization_config(quantization)",
            "get_graph_runner_cls()",
            "get_compile_backend(mode=None)",
            "apply_server_args_defaults(server_args)",
            "init_backend()",
        ),
        "overrides",
        "platform.out_of_tree",
        "SGLang asks the platform.",
    ),
    HostFact(
        _PLATFORM,
        (
            "get_mha_kv_pool_cls()",
            "get_mla_kv_pool_cls()",
            "get_dsa_kv_pool_cls()",
        ),
        "overrides",
        "compat.v0_5_21",
        "The pools of keys and values.",
        until="0.5.22",
    ),
    HostFact(
        _PLATFORM,
        ("get_kv_pool_cls(*, kind)",),
        "overrides",
        "platform.out_of_tree",
        "The pools of keys and values.",
        since="0.5.22",
    ),
    HostFact(
        _PLATFORM,
        ("get_group_coordinator_device(local_rank)",),
        "overrides",
        "platform.out_of_tree",
        "SGLang would take a rank's device for the CPU.",
        since="0.5.23",
    ),
    HostFact(
        _PLATFORM,
        ("capabilities",),
        "overrides",
        "platform.out_of_tree",
        "Whether graphs are captured and SGLang's own Triton kernels started.",
        since="0.5.22",
    ),
    HostFact(
        "sglang.srt.platforms.interface:PlatformCapabilities",
        ("supports_triton", "graph_capture"),
        "reads",
        "platform.out_of_tree",
        "Whether graphs are captured and SGLang's own Triton kernels started.",
        since="0.5.22",
    ),
    HostFact(
        DECODE_GRAPHS,
        ("capture()", "can_run_graph(forward_batch)", "execute(*args, **kwargs)"),
        "overrides",
        "graphs.decode",
        "Choices are warmed up and frozen before graphs are captured, and replays are counted.",
        since="0.5.20",
    ),
    HostFact(
        _PLATFORM,
        ("support_cuda_graph()", "support_piecewise_cuda_graph()"),
        "overrides",
        "compat.v0_5_21",
        "Whether graphs are captured.",
        until="0.5.22",
    ),
)

FACTS = (*HOOKED, *READ, *OVERRIDDEN, *QUANTIZATION, *speculation.OTHER)

"""Facts about vLLM 0.26 alone."""

from __future__ import annotations

from fl_dispatch.hosting.host_facts import HostFact

_LAYERS = "vllm.model_executor.layers"
_MLA = f"{_LAYERS}.attention.mla_attention"
_PREFILL = "vllm.v1.attention.backends.mla.prefill"

FACTS = (
    HostFact(
        "vllm.v1.worker.block_table",
        ("_compute_slot_mapping_kernel",),
        "replaces",
        "compat.v0_26.kernels",
        "A Triton kernel; there is no Triton driver on a CPU, and this version has no register_kernels.",
        until="0.32",
    ),
    HostFact(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        ("_postprocess_triton()",),
        "replaces",
        "compat.v0_26.kernels",
        "It would put kernels of vLLM's compiled library in the places of the Triton kernels.",
        until="0.32",
    ),
    HostFact(
        _MLA,
        ("build_mla_chunked_context_metadata(**arguments)",),
        "replaces",
        "compat.v0_26.latent",
        "It pins memory; without an accelerator that raises.",
        until="0.32",
    ),
    HostFact(
        f"{_PREFILL}.registry",
        ("register_mla_prefill_backend", "MLAPrefillBackendEnum"),
        "replaces",
        "compat.v0_26.latent",
        "No platform is asked for the prefill of latent attention, and vLLM's needs compiled kernels. Filled through "
        "vLLM's own register_mla_prefill_backend.",
        until="0.32",
    ),
    HostFact(
        f"{_PREFILL}.base:MLAPrefillBackend",
        ("run_prefill_context_chunk(chunk_idx, q, k, v)",),
        "overrides",
        "compat.v0_26.latent",
        "A chunk of context is named by its number.",
        until="0.32",
    ),
    HostFact(
        f"{_LAYERS}.utils",
        ("dispatch_unquantized_gemm()",),
        "reads",
        "compat.v0_26.linear",
        "This version chooses the product of a linear layer in every call.",
        until="0.32",
    ),
    HostFact(
        "vllm.v1.worker.workspace",
        ("init_workspace_manager",),
        "reads",
        "compat.v0_26.worker",
        "No method of the worker makes only workspace and model runner.",
        until="0.32",
    ),
    HostFact(
        "vllm.model_executor.warmup.v1_block_table_warmup",
        ("warm_v1_block_table_kernels(device, max_tokens)",),
        "reads",
        "compat.v0_26.worker",
        "The Triton kernels of the V1 runner's block table are compiled beforehand.",
        until="0.32",
    ),
    HostFact(
        f"{_MLA}:MLACommonMetadataBuilder",
        (
            (
                "_build_decode(block_table_tensor, seq_lens_device, max_seq_len, query_start_loc_cpu, "
                "query_start_loc_device, num_decode_tokens, dcp_tot_seq_lens_device)"
            ),
        ),
        "overrides",
        "compat.v0_26.latent",
        "It does not say how long the longest request is.",
        until="0.32",
    ),
    HostFact(
        "vllm.v1.attention.backend:AttentionBackend",
        (
            "get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str=None)",
            "get_kv_cache_stride_order(include_num_layers_dimension=None)",
        ),
        "overrides",
        "compat.v0_26.attention",
        "An attention class is asked for the cache's shape.",
        until="0.32",
    ),
)

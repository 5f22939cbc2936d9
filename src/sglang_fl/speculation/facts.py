"""Names that speculation relies on in SGLang, for the table of :mod:`sglang_fl.host_facts`."""

from __future__ import annotations

from fl_dispatch.hosting.host_facts import HostFact

KERNELS = "sglang.kernels.ops.speculative"
UTILITIES = "sglang.srt.speculative.spec_utils"
EAGLE = "sglang.srt.speculative.eagle_utils"
FACTORY = "sglang.srt.speculative.draft_utils:DraftBackendFactory"
WORKER = "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker"
_PLATFORM = "sglang.srt.platforms.interface:SRTPlatform"
_SAMPLED = (
    "predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling, "
    "uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single, threshold_acc, "
    "deterministic, *, block_verification=False"
)

HOOKED = (
    HostFact(
        f"{KERNELS}.spec_tree",
        (
            (
                "build_tree_kernel_efficient_func(parent_list, top_scores_index, seq_lens, tree_mask, positions, "
                "retrieve_index, retrieve_next_token, retrieve_next_sibling, topk, spec_steps, num_verify_tokens, "
                "tree_mask_mode)"
            ),
            (
                "verify_tree_greedy_func(predicts, accept_index, accept_token_num, candidates, retrieve_index, "
                "retrieve_next_token, retrieve_next_sibling, target_predict, topk=-1)"
            ),
        ),
        "replaces",
        "speculation.hooked",
        "SGLang refuses to check drafts on a platform that is not its own, or compiles its kernels while it serves",
        since="0.5.23",
    ),
    HostFact(
        f"{KERNELS}.reject_sampling",
        (f"chain_speculative_sampling_triton({_SAMPLED})",),
        "replaces",
        "speculation.hooked",
        "SGLang rejects drafts by a Triton kernel",
        since="0.5.23",
    ),
    HostFact(
        f"{KERNELS}.row_argmax",
        ("row_argmax(x)",),
        "replaces",
        "speculation.hooked",
        "SGLang draws drafts that may be rejected by a Triton kernel",
        since="0.5.23",
    ),
    HostFact(
        f"{KERNELS}.cache_locs",
        (
            (
                "assign_draft_cache_locs_contiguous_func(req_pool_indices, req_to_token, seq_lens, out_cache_loc, "
                "topk, num_cols, positions=None, mrope=None)"
            ),
        ),
        "replaces",
        "speculation.hooked",
        "SGLang looks the slots of drafts up by a Triton kernel",
        since="0.5.23",
    ),
    HostFact(
        f"{KERNELS}.eagle",
        ("fill_bonus_tokens_func(accept_tokens, accept_lens, bonus_tokens, accept_stride, batch_size)",),
        "replaces",
        "speculation.hooked",
        "SGLang finds each request's last token by a Triton kernel",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.mem_cache.allocation",
        (
            (
                "assign_req_to_token_pool_func(req_pool_indices, req_to_token, start_offset, end_offset, "
                "out_cache_loc, batch_size)"
            ),
        ),
        "replaces",
        "speculation.hooked",
        "SGLang writes the slots of drafts by a Triton kernel",
        since="0.5.23",
    ),
    HostFact(
        UTILITIES,
        (
            (
                "move_accept_tokens_to_target_kvcache(batch, accept_index, num_correct_drafts, "
                "token_to_kv_pool_allocator)"
            ),
        ),
        "replaces",
        "speculation.hooked",
        "SGLang would move accepted tokens by Triton kernels",
        since="0.5.23",
    ),
    HostFact(
        FACTORY,
        ("_create_backend(backend_name, backend_map, *args, **kwargs)",),
        "replaces",
        "speculation.attention",
        "SGLang knows the attention backends of draft models by name, and none of a plugin",
        since="0.5.23",
    ),
    HostFact(
        WORKER,
        ("init_lm_head()",),
        "replaces",
        "speculation.hooked",
        "some models wait for CUDA when they take over an embedding, and PyTorch without CUDA raises",
        since="0.5.23",
    ),
)

OTHER = (
    HostFact(
        EAGLE,
        ("tree_speculative_sampling_target_only", "top_k_renorm_prob", "top_p_renorm_prob"),
        "replaces",
        "speculation.hooked",
        "Sampled drafts are checked by them; they are None where SGLang has no kernel, or compiled while it serves.",
        since="0.5.23",
    ),
    HostFact(
        f"{KERNELS}.reconstruct_tree",
        ("reconstruct_indices_from_tree_mask",),
        "replaces",
        "speculation.hooked",
        "SGLang imports it from a library that is compiled for GPUs.",
        since="0.5.23",
    ),
    HostFact(
        FACTORY,
        ("draft_model_runner", "speculative_num_steps", "topk"),
        "reads",
        "speculation.attention",
        "The model that drafts, how many tokens, and in how many branches.",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
        ("verify_mask",),
        "overrides",
        "attention.attention_backend",
        "SGLang would make a mask of all tokens of all requests; a tree needs the drafts' alone.",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
        ("_init_kv_copy_and_warmup()", "_kv_copy_config", "_move_kv_cache_impl(tgt_loc, src_loc)"),
        "overrides",
        "attention.pools",
        "SGLang would warm a Triton kernel up that copies within the cache, and copy by it.",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool",
        ("move_kv_cache(tgt_loc, src_loc)", "kv_buffer"),
        "overrides",
        "attention.pools",
        "SGLang would copy within the cache by a Triton kernel.",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.speculative.eagle_info:EagleVerifyInput",
        ("custom_mask", "topk", "draft_token_num"),
        "reads",
        "attention.attention_backend",
        "Which drafts a draft of a tree sees.",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.models.transformers:TransformersBase",
        ("attention_instances",),
        "reads",
        "attention.attention_layers",
        "Where a model of Transformers' has its attention layers, which are no modules of it.",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.layers.attention.verify_mask",
        ("VerifyMask",),
        "reads",
        "attention.attention_backend",
        "How SGLang asks for a mask.",
        since="0.5.23",
    ),
    HostFact(
        f"{KERNELS}.spec_tree:TreeMaskMode",
        ("QLEN_ONLY",),
        "reads",
        "speculation.forms",
        "How a mask lies.",
        since="0.5.23",
    ),
    HostFact(
        _PLATFORM,
        (
            "supports_speculative_algorithm(algorithm)",
            "get_speculative_worker_cls(algorithm)",
            "get_speculative_cache_locs_fn()",
        ),
        "overrides",
        "platform.out_of_tree",
        "Which algorithms run, and the slots of tokens that are checked.",
        since="0.5.23",
    ),
    HostFact(
        "sglang.srt.model_executor.model_runner:ModelRunner",
        ("is_draft_worker",),
        "reads",
        "worker.runner",
        "Whose model a record is of.",
    ),
    HostFact(
        "sglang.srt.speculative.base_spec_worker:BaseSpecWorker",
        ("_draft_model_runners()",),
        "reads",
        "report",
        "The layers of a model that drafts.",
        since="0.5.23",
    ),
)

FACTS = (*HOOKED, *OTHER)

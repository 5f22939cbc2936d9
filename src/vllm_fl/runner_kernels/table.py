"""The table of kernels and their forms, and its registration with vLLM."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from . import (
    batch,
    drafts,
    launch,
    logits,
    logprobs,
    native,
    ngram,
    predictors,
    prompts,
    rotary,
    sampling,
    states,
    tables,
    thinking,
    verification,
)

WORKER = "vllm.v1.worker"
RUNNER = f"{WORKER}.gpu"
SEVERAL = "gpu.spec_decode.multi_module_mtp.speculator"
"""Several predictors of one model."""
FORMS: Mapping[str, Callable[..., None]] = {
    "gpu.buffer_utils._apply_write_kernel": tables.apply_write,
    "gpu.block_table._gather_block_tables_kernel": tables.gather_block_tables,
    "gpu.block_table._compute_slot_mappings_kernel": tables.compute_slot_mappings,
    "gpu.cp_utils._dcp_local_seq_lens_kernel": tables.local_lengths,
    "gpu.input_batch._prepare_prefill_inputs_kernel": batch.prepare_prefill_inputs,
    "gpu.input_batch._prepare_pos_seq_lens_kernel": batch.prepare_pos_seq_lens,
    "gpu.input_batch._combine_sampled_and_draft_tokens_kernel": batch.combine_sampled_and_draft_tokens,
    "gpu.input_batch._get_num_sampled_and_rejected_kernel": batch.get_num_sampled_and_rejected,
    "gpu.input_batch._post_update_kernel": batch.post_update,
    "gpu.input_batch._post_update_num_computed_tokens_kernel": batch.post_update_num_computed_tokens,
    "gpu.input_batch._expand_idx_mapping_kernel": batch.expand_idx_mapping,
    "gpu.mm.rope._prepare_rope_positions_kernel": rotary.prepare_rope_positions,
    "gpu.model_states.mamba_hybrid._scatter_num_accepted_kernel": states.scatter_num_accepted,
    "gpu.model_states.mamba_hybrid._fill_num_accepted_kernel": states.fill_num_accepted,
    "gpu.metrics.logits._num_nans_kernel": logits.num_nans,
    "gpu.sample.bad_words._bad_words_kernel": logits.bad_words,
    "gpu.sample.gumbel._temperature_kernel": logits.temperature,
    "gpu.sample.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
    "gpu.sample.logit_bias._bias_kernel": logits.bias,
    "gpu.sample.logprob._topk_log_softmax_kernel": logprobs.topk_log_softmax,
    "gpu.sample.logprob._ranks_kernel": logprobs.ranks,
    "gpu.sample.logprob._fill_logprob_token_ids_kernel": logprobs.fill_logprob_token_ids,
    "gpu.sample.min_p._min_p_kernel": logits.min_p,
    "gpu.sample.output._compact_sampling_mask_kernel": logprobs.compact_sampling_mask,
    "gpu.sample.penalties._penalties_kernel": logits.penalties,
    "gpu.sample.penalties._bincount_kernel": logits.bincount,
    "gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": logprobs.prompt_logprobs_token_ids,
    "gpu.sample.thinking_budget._thinking_budget_kernel": thinking.thinking_budget,
    "gpu.sample.thinking_budget._update_committed_marker_cache_kernel": thinking.update_committed_marker_cache,
    "gpu.sample.trace_replay._trace_replay_kernel": sampling.trace_replay,
    f"{SEVERAL}._prepare_input_buffers_kernel": predictors.prepare_input_buffers,
    f"{SEVERAL}._prepare_input_hidden_states_and_embeddings_kernel": predictors.prepare_hidden_states,
    f"{SEVERAL}._pad_trailing_draft_slots_kernel": predictors.pad_trailing_slots,
    f"{SEVERAL}._cache_inputs_kernel": predictors.cache_inputs,
    f"{SEVERAL}._shift_input_ids_kernel": predictors.shift_input_ids,
    f"{SEVERAL}._shift_input_embeds_kernel": predictors.shift_input_embeds,
    "gpu.spec_decode.ngram.speculator._ngram_scan_kernel": ngram.scan,
    "gpu.spec_decode.ngram.speculator._ngram_finalize_kernel": ngram.finalize,
    "gpu.spec_decode.rejection_sampler._flatten_sampled_kernel": verification.flatten_sampled,
    "gpu.spec_decode.rejection_sampler._gather_draft_sampled_kernel": verification.gather_draft_sampled,
    "gpu.spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel": verification.local_logits_stats,
    "gpu.spec_decode.rejection_sampler_utils._rejection_kernel": verification.rejection,
    "gpu.spec_decode.rejection_sampler_utils._resample_kernel": verification.resample,
    "gpu.spec_decode.rejection_sampler_utils._insert_resampled_kernel": verification.insert_resampled,
    "gpu.spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel": drafts.expand_prefill_inputs,
    "gpu.spec_decode.target_dependent_ar.speculator._prepare_prefill_inputs_kernel": drafts.prepare_prefill_inputs,
    "gpu.spec_decode.target_dependent_ar.speculator._prepare_decode_inputs_kernel": drafts.prepare_decode_inputs,
    "gpu.spec_decode.target_dependent_ar.speculator._update_draft_inputs_kernel": drafts.update_draft_inputs,
    "gpu.structured_outputs._apply_grammar_bitmask_kernel": logits.apply_grammar_bitmask,
    "mamba_utils.preprocess_mamba_align_fused_kernel": states.preprocess_align,
    "mamba_utils.precopy_mamba_align_fused_kernel": states.precopy_align,
    "mamba_utils.postprocess_mamba_fused_kernel": states.postprocess,
    "utils._zero_kv_blocks_kernel": states.zero_kv_blocks,
}
"""Kernel, below :data:`WORKER` → its form."""


def by_module() -> dict[str, tuple[str, ...]]:
    """Return module, below :data:`WORKER` → its kernels with forms."""
    found: dict[str, tuple[str, ...]] = {}
    for name in FORMS:
        module, _, kernel = name.rpartition(".")
        found[module] = (*found.get(module, ()), kernel)
    return found


def names_of(name: str) -> list[str]:
    """Return the names of the parameters of a kernel of :data:`FORMS`."""
    module, _, kernel = f"{WORKER}.{name}".rpartition(".")
    return launch.names_of(getattr(importlib.import_module(module), kernel))


def register(main_memory: bool = False) -> None:
    """Make vLLM launch the forms in place of the kernels, in this process. Idempotent.

    Args:
        main_memory: whether tensors are in main memory, where C++ replaces the forms of each decoding step.
    """
    from vllm.triton_utils import triton
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.worker.gpu.block_table import BlockTables

    if getattr(BlockTables, "fl_remembers", False):
        return
    if not hasattr(triton, "next_power_of_2"):  # vLLM's stand-in for Triton without a driver lacks it
        triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    changed: Any = BlockTables
    changed._make_ptr_tensor = tables.remember(BlockTables._make_ptr_tensor)
    changed.fl_remembers = True
    embeddings: Any = importlib.import_module(f"{RUNNER}.model_states.prompt_embeds")
    embeddings.PromptEmbedsState.apply = prompts.overlay
    lookup: Any = importlib.import_module(f"{RUNNER}.spec_decode.ngram.speculator")
    lookup.HAS_TRITON = True  # otherwise it refuses to be made; its kernels have forms
    if not main_memory:
        buffers: Any = importlib.import_module(f"{RUNNER}.buffer_utils")
        buffers.UvaBackedTensor.copy_to_uva = sampling.remember(buffers.UvaBackedTensor.copy_to_uva)
    launched = native.launched if main_memory else launch.launched
    register_kernels({f"{WORKER}.{name}": launched(form, names_of(name)) for name, form in FORMS.items()})

"""Which form stands for which kernel, and how vLLM is told."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from . import batch, drafts, logits, logprobs, ngram, prompts, rotary, sampling, tables, thinking, verification

RUNNER = "vllm.v1.worker.gpu"
FORMS: Mapping[str, Callable[..., None]] = {
    "buffer_utils._apply_write_kernel": tables.apply_write,
    "block_table._gather_block_tables_kernel": tables.gather_block_tables,
    "block_table._compute_slot_mappings_kernel": tables.compute_slot_mappings,
    "input_batch._prepare_prefill_inputs_kernel": batch.prepare_prefill_inputs,
    "input_batch._prepare_pos_seq_lens_kernel": batch.prepare_pos_seq_lens,
    "input_batch._combine_sampled_and_draft_tokens_kernel": batch.combine_sampled_and_draft_tokens,
    "input_batch._get_num_sampled_and_rejected_kernel": batch.get_num_sampled_and_rejected,
    "input_batch._post_update_kernel": batch.post_update,
    "input_batch._post_update_num_computed_tokens_kernel": batch.post_update_num_computed_tokens,
    "input_batch._expand_idx_mapping_kernel": batch.expand_idx_mapping,
    "mm.rope._prepare_rope_positions_kernel": rotary.prepare_rope_positions,
    "metrics.logits._num_nans_kernel": logits.num_nans,
    "sample.bad_words._bad_words_kernel": logits.bad_words,
    "sample.gumbel._temperature_kernel": logits.temperature,
    "sample.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
    "sample.logit_bias._bias_kernel": logits.bias,
    "sample.logprob._topk_log_softmax_kernel": logprobs.topk_log_softmax,
    "sample.logprob._ranks_kernel": logprobs.ranks,
    "sample.logprob._fill_logprob_token_ids_kernel": logprobs.fill_logprob_token_ids,
    "sample.min_p._min_p_kernel": logits.min_p,
    "sample.output._compact_sampling_mask_kernel": logprobs.compact_sampling_mask,
    "sample.penalties._penalties_kernel": logits.penalties,
    "sample.penalties._bincount_kernel": logits.bincount,
    "sample.prompt_logprob._prompt_logprobs_token_ids_kernel": logprobs.prompt_logprobs_token_ids,
    "sample.thinking_budget._thinking_budget_kernel": thinking.thinking_budget,
    "sample.thinking_budget._update_committed_marker_cache_kernel": thinking.update_committed_marker_cache,
    "spec_decode.ngram.speculator._ngram_scan_kernel": ngram.scan,
    "spec_decode.ngram.speculator._ngram_finalize_kernel": ngram.finalize,
    "spec_decode.rejection_sampler._flatten_sampled_kernel": verification.flatten_sampled,
    "spec_decode.rejection_sampler._gather_draft_sampled_kernel": verification.gather_draft_sampled,
    "spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel": verification.local_logits_stats,
    "spec_decode.rejection_sampler_utils._rejection_kernel": verification.rejection,
    "spec_decode.rejection_sampler_utils._resample_kernel": verification.resample,
    "spec_decode.rejection_sampler_utils._insert_resampled_kernel": verification.insert_resampled,
    "spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel": drafts.expand_prefill_inputs,
    "spec_decode.target_dependent_ar.speculator._prepare_prefill_inputs_kernel": drafts.prepare_prefill_inputs,
    "spec_decode.target_dependent_ar.speculator._prepare_decode_inputs_kernel": drafts.prepare_decode_inputs,
    "spec_decode.target_dependent_ar.speculator._update_draft_inputs_kernel": drafts.update_draft_inputs,
    "structured_outputs._apply_grammar_bitmask_kernel": logits.apply_grammar_bitmask,
}
"""Kernel, below :data:`RUNNER` → its form."""


def by_module() -> dict[str, tuple[str, ...]]:
    """Module, below :data:`RUNNER` → the kernels of it that have forms."""
    found: dict[str, tuple[str, ...]] = {}
    for name in FORMS:
        module, _, kernel = name.rpartition(".")
        found[module] = (*found.get(module, ()), kernel)
    return found


def register() -> None:
    """Have vLLM launch the forms in place of the kernels, in this process. Idempotent."""
    from vllm.triton_utils import triton
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.worker.gpu.block_table import BlockTables

    if getattr(BlockTables, "fl_remembers", False):
        return
    if not hasattr(triton, "next_power_of_2"):  # what stands for Triton where it has no driver lacks it
        triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    changed: Any = BlockTables
    changed._make_ptr_tensor = tables.remember(BlockTables._make_ptr_tensor)
    changed.fl_remembers = True
    embeddings: Any = importlib.import_module(f"{RUNNER}.model_states.prompt_embeds")
    embeddings.PromptEmbedsState.apply = prompts.overlay
    lookup: Any = importlib.import_module(f"{RUNNER}.spec_decode.ngram.speculator")
    lookup.HAS_TRITON = True  # else it refuses to be made; its kernels have forms
    register_kernels({f"{RUNNER}.{name}": form for name, form in FORMS.items()})

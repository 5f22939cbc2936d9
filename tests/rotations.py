"""Long files about one subject take turns in a run of everything; naming a file or an environment runs all of them."""

from __future__ import annotations

from dataclasses import dataclass

import sampling


@dataclass(frozen=True)
class Rotation:
    """Test files about one subject, of which a run of everything draws some.

    Args:
        draws: how many of the files a run draws.
        files: from the folder of the checkout.
    """

    draws: int
    files: tuple[str, ...]


ROTATIONS = {
    "what takes minutes": Rotation(
        1,
        (
            "tests/core/backends/cpu/test_native_fuzz.py",
            "tests/core/evidence/test_invariant.py",
            "tests/core/evidence/prove/test_prove.py",
            "tests/core/evidence/test_planted_faults.py",
            "tests/hosts/test_vendor_hour.py",
            "tests/vllm/compilation/test_compiled_models.py",
            "tests/vllm/layers/test_lora.py",
            "tests/vllm/worker/test_processes.py",
            "tests/vllm/entrypoints/test_trl.py",
            "tests/vllm/layers/test_vendor_state_space.py",
        ),
    ),
    "kernels in Triton's interpreter": Rotation(
        3,
        (
            "tests/core/backends/triton/test_hopper_attention.py",
            "tests/core/backends/triton/test_hopper_latent.py",
            "tests/core/backends/triton/test_hopper_listed.py",
            "tests/core/backends/triton/test_hopper_scores.py",
            "tests/core/backends/triton/test_joined_kernels.py",
            "tests/core/backends/triton/test_kernel_code.py",
            "tests/core/backends/triton/test_triton_linear.py",
            "tests/core/backends/triton/test_triton_quantized.py",
            "tests/core/backends/triton/test_triton_states.py",
        ),
    ),
    "quantized models": Rotation(
        2,
        (
            "tests/vllm/quantization/test_quantized.py",
            "tests/vllm/quantization/test_quantized_experts.py",
            "tests/vllm/quantization/test_quantized_blocks.py",
            "tests/vllm/quantization/test_quantized_cache.py",
            "tests/vllm/quantization/test_compressed_tensors.py",
            "tests/vllm/quantization/test_quantized_latent.py",
            "tests/vllm/quantization/test_quantized_latent_cache.py",
            "tests/vllm/quantization/test_quantized_lora.py",
            "tests/vllm/quantization/test_quantized_perplexity.py",
            "tests/vllm/quantization/test_quantized_sparse.py",
            "tests/vllm/quantization/test_quantized_states.py",
            "tests/vllm/quantization/test_gpt_oss.py",
            "tests/vllm/compilation/test_joined.py",
            "tests/sglang/quantization/test_sglang_gpt_oss.py",
            "tests/sglang/quantization/test_sglang_quantized.py",
            "tests/sglang/quantization/test_sglang_quantized_blocks.py",
            "tests/sglang/quantization/test_sglang_quantized_experts.py",
            "tests/sglang/quantization/test_sglang_quantized_latent.py",
            "tests/sglang/quantization/test_sglang_quantized_cache.py",
            "tests/sglang/quantization/test_sglang_latent_cache.py",
            "tests/sglang/quantization/test_sglang_quantized_lora.py",
            "tests/sglang/quantization/test_sglang_quantized_names.py",
            "tests/sglang/quantization/test_sglang_quantized_perplexity.py",
            "tests/sglang/quantization/test_sglang_quantized_states.py",
        ),
    ),
    "layers with a state, and drafts": Rotation(
        2,
        (
            "tests/vllm/layers/test_states.py",
            "tests/sglang/layers/test_sglang_states.py",
            "tests/vllm/layers/test_delta_net.py",
            "tests/vllm/models/test_vision.py",
            "tests/vllm/speculation/test_draft_counters.py",
            "tests/vllm/speculation/test_drafts.py",
            "tests/vllm/speculation/test_quantized_drafts.py",
            "tests/vllm/speculation/test_speculation.py",
            "tests/vllm/speculation/test_state_drafts.py",
            "tests/sglang/speculation/test_sglang_draft_counters.py",
            "tests/sglang/speculation/test_sglang_quantized_drafts.py",
            "tests/sglang/speculation/test_sglang_speculation.py",
            "tests/sglang/speculation/test_sglang_state_drafts.py",
        ),
    ),
    "evidence in engines": Rotation(
        3,
        (
            "tests/vllm/evidence/test_bisect_engine.py",
            "tests/vllm/evidence/test_damage_serve.py",
            "tests/vllm/evidence/test_perplexity.py",
            "tests/vllm/evidence/test_shadow_serve.py",
            "tests/vllm/entrypoints/test_p2p_damage.py",
            "tests/vllm/speculation/test_damaged_drafts.py",
            "tests/sglang/evidence/test_sglang_damage.py",
            "tests/sglang/evidence/test_sglang_damage_serve.py",
            "tests/sglang/evidence/test_sglang_perplexity.py",
            "tests/sglang/speculation/test_sglang_damaged_drafts.py",
        ),
    ),
    "engines of vLLM": Rotation(
        4,
        (
            "tests/vllm/models/test_architectures.py",
            "tests/vllm/evidence/test_aten_engine.py",
            "tests/vllm/worker/test_communicator.py",
            "tests/vllm/entrypoints/test_connectors.py",
            "tests/vllm/layers/test_hw_agnostic.py",
            "tests/vllm/compat/test_host_versions.py",
            "tests/vllm/worker/test_timed_kernels.py",
            "tests/vllm/worker/test_several_steps.py",
            "tests/vllm/attention/test_sparse_latent.py",
            "tests/vllm/platform/test_engine_selection.py",
            "tests/vllm/quantization/test_expert_methods.py",
            "tests/vllm/worker/test_model_runner_v2.py",
            "tests/vllm/layers/test_moe.py",
            "tests/vllm/compilation/test_one_token.py",
            "tests/vllm/platform/test_plugins.py",
            "tests/vllm/worker/test_ranks.py",
            "tests/vllm/entrypoints/test_requests.py",
            "tests/vllm/compilation/test_rotary_cache.py",
            "tests/vllm/worker/test_seeds.py",
            "tests/vllm/entrypoints/test_serve.py",
        ),
    ),
    "ways to serve with vLLM": Rotation(
        2,
        (
            "tests/vllm/entrypoints/test_p2p_engines.py",
            "tests/vllm/worker/test_nodes.py",
            "tests/vllm/worker/test_divided_cache.py",
            "tests/vllm/entrypoints/test_loading.py",
            "tests/vllm/compilation/test_debugging.py",
            "tests/vllm/worker/test_live_weights.py",
            "tests/vllm/entrypoints/test_pooling.py",
            "tests/vllm/entrypoints/test_snapshot_preload.py",
            "tests/vllm/models/test_half_precision.py",
            "tests/vllm/platform/test_invariance.py",
        ),
    ),
    "ways to serve with SGLang": Rotation(
        2,
        (
            "tests/sglang/evidence/test_sglang_bisect.py",
            "tests/sglang/layers/test_sglang_lora.py",
            "tests/sglang/worker/test_sglang_communicator.py",
            "tests/sglang/worker/test_sglang_data_parallel.py",
            "tests/sglang/worker/test_sglang_several_steps.py",
            "tests/sglang/compat/test_sglang_host_versions.py",
            "tests/sglang/platform/test_sglang_bad_input.py",
            "tests/sglang/platform/test_sglang_end.py",
            "tests/sglang/platform/test_sglang_selection.py",
            "tests/sglang/entrypoints/test_sglang_features.py",
            "tests/sglang/models/test_sglang_half.py",
            "tests/sglang/entrypoints/test_sglang_pooling.py",
            "tests/sglang/graphs/test_sglang_prefill_graphs.py",
            "tests/sglang/models/test_sglang_vision.py",
            "tests/sglang/models/test_sglang_transformers.py",
            "tests/sglang/worker/test_parallel.py",
        ),
    ),
    "the emulated chip": Rotation(
        2,
        (
            "tests/npu/test_npu_vllm.py",
            "tests/npu/test_npu_ways.py",
            "tests/npu/test_npu_flagcx.py",
            "tests/npu/test_npu_model_runner.py",
            "tests/npu/test_npu_several_steps.py",
            "tests/npu/test_npu_states.py",
            "tests/npu/test_npu_quantized.py",
            "tests/npu/test_npu_quantized_experts.py",
            "tests/npu/emulated/test_emulated_chip.py",
            "tests/npu/emulated/test_emulated_collectives.py",
            "tests/npu/test_own_chip.py",
            "tests/npu/test_verify_ascend.py",
            "tests/npu_sglang/test_npu_sglang.py",
            "tests/npu_sglang/test_npu_sglang_quantized.py",
            "tests/npu_sglang/test_npu_sglang_quantized_experts.py",
            "tests/npu_sglang/test_npu_sglang_states.py",
            "tests/npu_sglang/test_own_chip_sglang.py",
        ),
    ),
}
"""Subject → its files."""


def resting() -> set[str]:
    """Files that this commit's run of everything leaves to another commit's; none where all cases are asked for."""
    return {
        file
        for subject, rotation in ROTATIONS.items()
        for file in set(rotation.files) - set(sampling.drawn(rotation.files, rotation.draws, subject))
    }

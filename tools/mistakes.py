"""Make deliberate mistakes in a copy of the sources, and run tests that must fail.

    python tools/mistakes.py [NAME ...]

A mistake that no test notices is a gap in the tests: the exit status is the number of these.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAMILIES = "tests/vllm/models/test_families.py"
COMPILED = "tests/vllm/compilation/test_compiled_models.py"
TESTS_FAILED = 1
"""Exit status of pytest if tests failed."""


@dataclass(frozen=True)
class Mistake:
    """A replacement of a text in a source file, and a test that must fail with it.

    Args:
        name: of the mistake, as a sentence.
        file: below ``src``.
        right: the original text; it occurs once in the file.
        wrong: its replacement.
        test: node id of the test.
        venv: the environment that the test runs in.
    """

    name: str
    file: str
    right: str
    wrong: str
    test: str
    venv: str = ".venv"


MISTAKES = (
    Mistake(
        "no window",
        "vllm_fl/attention/dense.py",
        "self.sliding_window = sliding_window",
        "self.sliding_window = None",
        f"{FAMILIES}::test_tokens_equal_hugging_face[gemma3]",
    ),
    Mistake(
        "no soft cap",
        "vllm_fl/attention/dense.py",
        "self.softcap = float(logits_soft_cap or 0.0)",
        "self.softcap = 0.0",
        f"{FAMILIES}::test_tokens_equal_hugging_face[gemma2]",
    ),
    Mistake(
        "latent context from the first block only",
        "vllm_fl/attention/mla_context.py",
        "[request, position // block_size]",
        "[request, 0 * position]",
        f"{FAMILIES}::test_a_pass_from_the_prefix_cache_gives_the_same_tokens[deepseek_v2]",
    ),
    Mistake(
        "latent context without its scale",
        "vllm_fl/attention/mla_context.py",
        "(rows_found.float() * scale)",
        "rows_found",
        "tests/vllm/attention/test_mla_layer.py"
        "::test_context_of_a_cache_in_fp8_is_what_was_stored_and_new_tokens_are_as_they_are",
    ),
    Mistake(
        "a router's bias is forgotten",
        "vllm_fl/layers/routers.py",
        "    arguments = (router.top_k, router.renormalize, router.e_score_correction_bias)",
        "    arguments = (router.top_k, router.renormalize, None)",
        f"{FAMILIES}::test_tokens_equal_hugging_face[minimax_m2]",
    ),
    Mistake(
        "experts forget their layer",
        "vllm_fl/layers/mixture.py",
        "        super().fl_bind(scope)\n        self._hand_over()",
        "        super().fl_bind(None)\n        self._hand_over()",
        f"{FAMILIES}::test_a_rule_can_name_the_experts_of_one_layer",
    ),
    Mistake(
        "products stay the host's",
        "vllm_fl/layers/linear.py",
        "            self.quant_method.apply = apply",
        "            pass",
        f"{FAMILIES}::test_the_products_of_a_model_are_the_vendors[qwen3]",
    ),
    Mistake(
        "a binding that follows no policy",
        "vllm_fl/attention/dense.py",
        'self.fl_attend = bind_op("paged_attention", scope)',
        'from fl_dispatch import resolve_op; self.fl_attend = resolve_op("paged_attention")',
        f"{FAMILIES}::test_a_wrong_implementation_changes_the_tokens[qwen3-paged_attention]",
    ),
    Mistake(
        "graphs of other choices are loaded",
        "vllm_fl/compilation/compile.py",
        "    vllm_config.additional_config[MANIFEST_KEY] = manifest_hash",
        "    vllm_config.additional_config[MANIFEST_KEY] = 'the same'",
        f"{COMPILED}::test_a_ban_under_the_same_policy_does_not_load_the_graph_of_what_is_banned",
    ),
    Mistake(
        "failures are recorded without the lock",
        "fl_dispatch/knowledge/failures.py",
        "        with writers:\n            kinds = dict(",
        "        if True:\n            kinds = dict(",
        "tests/core/run/test_concurrency.py::test_a_change_of_the_bans_waits_for_the_one_at_work",
    ),
    Mistake(
        "a second form of a weight stays old",
        "fl_dispatch/weight_forms.py",
        "_unwritten(weight) and len(forms.fresh) == len(forms.made):",
        "_unwritten(weight):",
        "tests/core/knowledge/test_prepared.py::test_a_second_form_follows_a_write_after_another_one_was_made_anew",
    ),
    Mistake(
        "a weight is prepared while an array has its memory",
        "fl_dispatch/weight_forms.py",
        "    if _is_shared(weight):",
        "    if False:",
        "tests/core/knowledge/test_prepared.py::test_products_are_of_the_weight_as_it_is_also_where_an_older_alias_writes",
    ),
    Mistake(
        "pages are taken from a buffer that glibc reuses",
        "fl_dispatch/hosting/memory/paging.py",
        "    return is_mapped and size",
        "    return size",
        "tests/core/hosting/test_paging.py::test_a_header_that_glibc_did_not_write_is_not_taken_for_one",
    ),
    Mistake(
        "pages are dropped, and read as zeros",
        "fl_dispatch/hosting/memory/paging.py",
        '_system("mremap", copy, length, length, _MAY_MOVE_TO_ADDRESS, start)',
        '_system("madvise", start, length, mmap.MADV_DONTNEED)',
        "tests/core/hosting/test_paging.py::test_every_reader_finds_every_bit",
    ),
    Mistake(
        "a child process writes the pages of its parent",
        "fl_dispatch/hosting/memory/paging.py",
        "access, mmap.MAP_PRIVATE",
        "access, mmap.MAP_SHARED",
        "tests/core/hosting/test_paging.py::test_a_child_process_has_its_own_pages",
    ),
    Mistake(
        "pages are lost to a disk that fails",
        "fl_dispatch/hosting/memory/paging.py",
        "            if ctypes.CDLL(None).memcmp(*map(ctypes.c_size_t, (copy, start, length))):",
        "            if False:",
        "tests/core/hosting/test_paging.py::test_a_disk_that_fails_leaves_the_weights_in_memory_and_the_log_says_why",
    ),
    Mistake(
        "attributes of tensors are not restored",
        "fl_dispatch/run/snapshot.py",
        """        if isinstance(value, torch.Tensor):
            parts.append(value)
        elif""",
        """        if isinstance(value, torch.Tensor):
            parts.append(value)
            continue
        elif""",
        "tests/core/run/test_attacks_snapshots.py::test_what_an_undeclared_operator_wrote_inside_an_argument_is_restored",
    ),
    Mistake(
        "a residual is declared an output",
        "fl_dispatch/ops/fused.py",
        'writes={"residual": Write(Access.UPDATE, given="residual")},',
        'writes={"residual": Write(Access.OUTPUT, given="residual")},',
        "tests/core/run/test_recovery.py::test_an_argument_that_is_declared_an_output_is_never_read",
    ),
    Mistake(
        "thawing leaves the tables of frozen dispatch",
        "fl_dispatch/compiled/freezing.py",
        "            self._state.fixed.fix(None)\n            self._state.changed(None)",
        "            self._state.fixed.fix(None)",
        "tests/core/run/test_freezing.py::test_a_thawed_call_has_all_the_care_that_a_frozen_one_has_not",
    ),
    Mistake(
        "a second run writes the caller's output",
        "fl_dispatch/shadow/mode.py",
        "for name, (_, tensor) in written.items()}",
        "for name, (access, tensor) in written.items() if access is Access.UPDATE}",
        "tests/core/shadow/test_shadow.py::test_the_second_run_leaves_whatever_the_caller_passed_as_the_first_one_left_it",
    ),
    Mistake(
        "the policy stays in the parent",
        "fl_dispatch/hosting/start/handover.py",
        "    if theirs.policy.to_json() != mine.policy.to_json():",
        "    if False:",
        "tests/vllm/platform/test_engine_selection.py::test_a_policy_set_in_code_reaches_the_engine_process[spawn]",
    ),
    Mistake(
        "ranks are not compared",
        "vllm_fl/worker/ranks.py",
        "    agreement.refuse_divergence(get_world_group().cpu_group, group.cpu_group)",
        "    pass",
        "tests/vllm/worker/test_ranks.py::test_pipeline_stages_of_which_one_has_another_implementation_refuse_to_serve",
    ),
    Mistake(
        "ranks keep the tactics that each has timed",
        "fl_dispatch/hosting/ranks/agreement.py",
        "    tactics.install(agreed)",
        "    pass",
        "tests/core/hosting/ranks/test_tactics.py::test_once_they_agree_both_run_the_lowest_ranks",
    ),
    Mistake(
        "norms in half precision",
        "fl_dispatch/ops/normalization.py",
        "    wide = torch.promote_types(x.dtype, torch.float32)\n    total",
        "    wide = x.dtype\n    total",
        "tests/vllm/models/test_half_precision.py::test_log_probabilities_are_as_near_to_float32_as_hugging_faces",
    ),
    Mistake(
        "lists of layers are ignored",
        "vllm_fl/layers/classes.py",
        "        return any(settings.registers(self.name, operator) for operator in self.operators)",
        "        return True",
        "tests/vllm/platform/test_plugins.py::test_a_list_names_layers_by_operator_or_by_class",
    ),
    Mistake(
        "no step of a compiled engine runs eagerly",
        "vllm_fl/worker/eager_steps.py",
        "self._eager() if",
        "nullcontext() if",
        "tests/vllm/evidence/test_shadow_compiled.py",
    ),
    Mistake(
        "blocks of a damaged request stay in the prefix cache",
        "vllm_fl/damage/scheduler.py",
        "        self._evict(block for group in groups for block in group)",
        "        self._evict(groups[:0])",
        "tests/vllm/evidence/test_damage_serve.py::"
        "test_a_request_with_nan_ends_alone_with_its_origin_and_nothing_of_it_stays[V2]",
    ),
    Mistake(
        "drafts that were chosen from NaN are verified as others",
        "vllm_fl/damage/detection.py",
        "invalid = damaged if invalid is None else damaged | invalid",
        "del damaged",
        "tests/vllm/speculation/test_damaged_drafts.py::test_damage_in_drafts_costs_acceptance_and_no_answer",
    ),
    Mistake(
        "an engine keeps blocks that their sender took back",
        "fl_transfer/p2p/engine/exchange.py",
        "self._inbox.take_back(transfer, message.why)",
        "pass",
        "tests/transfer/test_p2p.py::test_a_receiver_is_told_what_its_sender_takes_back",
    ),
    Mistake(
        "windows of a picture see each other",
        "vllm_fl/layers/encoder_attention.py",
        "else cu_seqlens.tolist()",
        "else [0, batch * length]",
        "tests/vllm/attention/test_encoder_attention.py",
    ),
    Mistake(
        "a draft begins behind its request",
        "vllm_fl/runner_kernels/drafts.py",
        "    last_token_indices[:requests] = start[:-1] + kept - 1",
        "    last_token_indices[:requests] = start[:-1] + kept",
        "tests/vllm/worker/test_runner_kernels.py",
    ),
    Mistake(
        "metrics of other servers' workers",
        "fl_dispatch/hosting/records/runs.py",
        "if mine := [run for run in alive if run.descends_from(root)]",
        "if mine := recorded()",
        "tests/core/hosting/test_runs.py::test_metrics_have_what_the_workers_of_this_front_end_recorded",
    ),
    Mistake(
        "a window one token short",
        "sglang_fl/attention/attention_layers.py",
        "before < 0 else int(before) + 1",
        "before < 0 else int(before)",
        "tests/sglang/models/test_sglang_tokens.py::test_tokens_equal_hugging_face[gemma2]",
        venv=".venv-sglang",
    ),
    Mistake(
        "a product without its bias",
        "sglang_fl/bridge/linear.py",
        "return self.fl_call(x, layer.weight, bias)",
        "return self.fl_call(x, layer.weight, None)",
        "tests/sglang/layers/test_sglang_linear.py::test_a_product_is_one_call_and_what_pytorch_computes",
        venv=".venv-sglang",
    ),
    Mistake(
        "a cache's scales of keys and values are exchanged",
        "vllm_fl/attention/dense.py",
        "(layer._k_scale_float, layer._v_scale_float, None, None)",
        "(layer._v_scale_float, layer._k_scale_float, None, None)",
        "tests/vllm/quantization/test_quantized_cache.py"
        "::TestCaches::test_it_computes_what_the_network_with_rounded_keys_and_values_does",
    ),
    Mistake(
        "a quantized head is served",
        "sglang_fl/quantization/configs.py",
        "if isinstance(layer, ParallelLMHead) and self.fl_quantizes_head(prefix):",
        "if False:",
        "tests/sglang/quantization/test_sglang_quantized_layers.py"
        "::TestLayers::test_each_layer_of_each_checkpoint_is_served_or_refused_as_recorded",
        venv=".venv-sglang",
    ),
    Mistake(
        "ranks divide groups of experts",
        "fl_dispatch/hosting/quantized/experts.py",
        "if group > 0 and size % group:",
        "if group > size:",
        "tests/vllm/quantization/test_expert_methods.py"
        "::TestExperts::test_parts_of_experts_that_do_not_stand_alone_are_refused",
    ),
    Mistake(
        "a scale that a checkpoint lacks is taken as it is",
        "fl_dispatch/hosting/quantized/orders.py",
        "and not bool((values > UNSET).all())",
        "and False",
        "tests/sglang/quantization/test_sglang_expert_methods.py"
        "::TestExperts::test_a_scale_that_the_checkpoint_lacks_is_noticed",
        venv=".venv-sglang",
    ),
    Mistake(
        "a rotation's scale is forgotten",
        "fl_dispatch/hosting/positions/rotary_tables.py",
        "torch.cat((angles.cos(), angles.sin()), -1) * self.scale",
        "torch.cat((angles.cos(), angles.sin()), -1)",
        "tests/vllm/layers/test_rotations.py"
        "::TestRotations::test_queries_are_turned_as_in_hugging_face[yarn, attention_factor]",
    ),
    Mistake(
        "a weight that no tensor filled is served",
        "fl_dispatch/hosting/loading/refusals.py",
        "if not (found := account.unfilled(model, allowed)):",
        "if not (found := []):",
        "tests/vllm/quantization/test_unfitting_checkpoints.py"
        "::TestCheckpoints::test_a_checkpoint_that_does_not_fit_is_refused_by_layer_and_tensor[a norm]",
    ),
    Mistake(
        "a latent cache is read without its scale",
        "vllm_fl/attention/mla.py",
        "            layer._k_scale_float if self.fl_fp8 else None,",
        "            None,",
        "tests/vllm/quantization/test_quantized_latent_cache.py"
        "::TestCaches::test_it_computes_what_the_network_with_rounded_latents_does",
    ),
    Mistake(
        "a rejected draft is answered",
        "vllm_fl/runner_kernels/verification.py",
        "token = torch.where((temperature == 0) & ~accepted, best, draft)",
        "token = draft",
        "tests/vllm/speculation/test_drafts.py::TestDrafts::test_greedy_tokens_are_those_without_drafts",
    ),
    Mistake(
        "tokens have the adapter of their mirror image",
        "vllm_fl/layers/lora.py",
        "        adapters[: len(host)] = host\n",
        "        adapters[: len(host)] = host[::-1]\n",
        "tests/vllm/layers/test_lora.py::TestAdapters::test_adapters_and_none_mix_in_one_batch",
    ),
    Mistake(
        "a package's defaults are not read",
        "fl_dispatch/settings/load.py",
        "path = platforms.get_config_path(platform) if platform is not None else None",
        "path = None",
        "tests/npu/test_own_chip.py::TestChip::test_its_defaults_are_in_force",
        venv=".venv-npu",
    ),
)


def noticed(mistake: Mistake) -> bool:
    """Whether the test fails with the mistake in a copy of the sources."""
    every = {"FL_SAMPLE": "all"} if "[" in mistake.test else {}  # the commit's sample may leave the named case out
    with tempfile.TemporaryDirectory(prefix="fl-mistake-") as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / mistake.file
        text = file.read_text()
        if text.count(mistake.right) != 1:
            sys.exit(f"mistakes.py: '{mistake.right}' stands {text.count(mistake.right)} times in {mistake.file}")
        file.write_text(text.replace(mistake.right, mistake.wrong))
        ended = subprocess.run(
            [ROOT / mistake.venv / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", mistake.test],
            cwd=ROOT,
            env={**os.environ, **every, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if ended.returncode not in (0, TESTS_FAILED):
        sys.exit(f"mistakes.py: pytest ended with {ended.returncode}\n{ended.stdout}")
    return ended.returncode == TESTS_FAILED


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Plant mistakes in copies of the sources, one after the other: each has to turn its test red. "
        "The exit status is the number of those that were not noticed."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mistakes; all by default")
    parser.add_argument("--list", action="store_true", help="print the mistakes and their tests, and plant none")
    options = parser.parse_args()
    if options.list:
        for mistake in MISTAKES:
            print(f"{mistake.name}: {mistake.test}")
        return 0
    names, missed = options.names, 0
    if unknown := set(names) - {mistake.name for mistake in MISTAKES}:
        parser.error(f"no mistake is called '{min(unknown)}'; --list prints them")
    for mistake in MISTAKES:
        if names and mistake.name not in names:
            continue
        began = time.monotonic()
        found = noticed(mistake)
        missed += not found
        state = "noticed" if found else "NOT NOTICED"
        print(f"{state:12} {time.monotonic() - began:4.0f} s  {mistake.name}: {mistake.test}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())

"""The worker: one process with a device, a model, and the dispatch core.

This module has the part that all devices share. :mod:`vllm_fl.worker.cpu` and :mod:`vllm_fl.worker.gpu` start the
device, divide its memory, and decide when choices are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker

from fl_dispatch import freeze_dispatch, get_default_manager, weight_forms
from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.records import runs
from fl_dispatch.hosting.records.report import dispatch_report
from fl_dispatch.hosting.start import aten, oplist, tactics
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from .. import checkpoint, quantization
from ..attention import cache_slots, kv_layout
from ..compat import generators, loaders, model_runner, models, state_drafts, versions
from ..compilation import compile, one_token, quantized_results
from ..damage import detection as damage
from ..layers import classes, linear, rotations
from ..platform import startup
from ..schedulers import makes_several_steps
from ..several_steps import choice as several_steps
from . import eager_steps, ranks, watched_steps

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = get_logger(__name__)


class WorkerFL(Worker):
    """vLLM's worker with the dispatch core."""

    fl_counts_before: Mapping[str, int]
    fl_eager_steps: eager_steps.EagerSteps | eager_steps.NoEagerSteps = eager_steps.NoEagerSteps()
    fl_weights: linear.Weights
    fl_pools: bool = False
    """Whether weights and cache are in pools of vLLM's allocator, on an out-of-tree platform."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        startup.adopt(vllm_config.additional_config)
        startup.activate()
        loaders.count()
        transformers = vllm_config.model_config.using_transformers_backend()
        classes.register(get_settings(), in_worker=True, transformers=transformers)
        if current_platform.is_out_of_tree() and vllm_config.model_config.quantization is not None:
            quantization.register()
        kv_layout.choose(vllm_config)
        if vllm_config.use_v2_model_runner:
            model_runner.prepare(detect_device())
        self.fl_several_steps = makes_several_steps(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    # -- start-up -----------------------------------------------------------------------------------------------------

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if current_platform.is_out_of_tree() and not self.fl_pools:
            return nullcontext()
        return super()._maybe_get_memory_pool_context(tag)

    def _make_model_runner(self) -> Any:
        if not self.fl_several_steps:
            return super()._make_model_runner()
        from ..several_steps.runner import StepsRunner

        return StepsRunner(self.vllm_config, self.device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if models.has_indexer(self.model_config):
            from ..layers import indexer

            indexer.install()
        super().load_model(*args, **kwargs)
        if models.has_indexer(self.model_config):
            indexer.check(self.get_model())
        checkpoint.refuse_left(self.model_config, get_world_group().cpu_group)
        if self.vllm_config.lora_config is not None:
            from ..layers import lora

            lora.track_logits(self.model_runner, self.use_v2_model_runner)
        if not self.use_v2_model_runner:
            generators.rewind(self.model_runner, detect_device())
        elif self.vllm_config.speculative_config is not None and models.has_states(self.model_config):
            state_drafts.put_in_order(self.model_runner)
        rotations.correct(self.get_model(), self.vllm_config)
        rotations.give_windows(self.get_model(), self.vllm_config)
        model = self.fl_models()
        classes.bind_scopes(model)
        linear.multiply_with_embeddings(model)
        config = self.vllm_config
        self.fl_weights = linear.Weights(model, compile.is_compiled(config), compile.is_captured(config))
        ranks.warn_of_unmatched_scopes()
        self.fl_survey = classes.survey(model)
        logger.info("%s", self.fl_survey.describe())
        self.fl_survey.refuse_native_run(get_settings())
        aten.replace(get_settings(), detect_device())
        tactics.begin()
        self._write_record()
        drafts = self.vllm_config.speculative_config is not None
        damage.install(self.model_runner, self.use_v2_model_runner, drafts)
        self.fl_watched_steps = watched_steps.WatchedSteps(self.vllm_config, self.fl_models(), self.model_runner)

    def fl_dummy_options(self) -> dict[str, Any]:
        """Return options of the V1 runner's dummy batches: with every adapter, as in the V2 runner's."""
        lora = self.vllm_config.lora_config
        return {} if self.use_v2_model_runner or lora is None else {"num_active_loras": lora.max_loras}

    def fl_models(self) -> nn.Module:
        """Return the model; with a draft model, a module that has both, with the draft model's parts as ``draft``."""
        model = self.get_model()
        if (draft := self.get_draft_model()) is None:
            return model
        both = nn.Module()
        both._modules.update({"": model, "draft": draft})  # "": the model's own parts keep their names
        return both

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        kv_layout.refuse_unlike_groups(kv_cache_config)
        super().initialize_from_config(kv_cache_config)

    def _write_record(self) -> None:
        """Write the record for ``fl doctor``, and the list of operators that FlagGems runs."""
        parallel, host = self.parallel_config, f"vLLM {versions.host_version()}"
        rank = self.rank + parallel.data_parallel_rank * parallel.world_size
        runner = f"{model_runner.choice(self.vllm_config)}; {several_steps.describe(self.vllm_config)}"
        runs.record(host, self.model_config.model, self.fl_survey, {}, rank, runner, self._sizes(), says_end=True)
        oplist.record(get_default_manager(), get_settings(), self.rank if self.parallel_config.world_size > 1 else None)

    def _sizes(self) -> runs.Sizes:
        """Return the sizes of the engine's steps, for the record."""
        scheduler, graphs = self.vllm_config.scheduler_config, self.vllm_config.compilation_config.cudagraph_mode
        return runs.Sizes(
            str(self.model_config.dtype).removeprefix("torch."),
            self.parallel_config.tensor_parallel_size,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            graphs is None or graphs.name == "NONE",
            compile.is_compiled(self.vllm_config),
        )

    def _compare_ranks(self) -> None:
        """Refuse to serve if ranks would choose differently. Every rank must call it, after its first batch."""
        if get_world_group().world_size > 1:
            ranks.refuse_divergence(ranks.same_layers(self.model_config))

    def _freeze(self) -> None:
        """Fix every choice, before anything is compiled or captured."""
        ranks.agree_on_replaced_operators()
        model = self.fl_models()
        quantized_results.keep_whole(model, self.vllm_config)
        one_token.prepare(model, self.vllm_config)
        manifest = freeze_dispatch(compile.is_compiled(self.vllm_config))
        ranks.refuse_other_manifest(manifest, ranks.same_layers(self.model_config))
        compile.enter_cache_key(self.vllm_config, manifest.hash)
        classes.bind_scopes(model)  # from now on to the bare implementations
        self.fl_counts_before = compile.counts()
        compile.start(self.get_model(), self.vllm_config)

    def _finish_start(self) -> None:
        """Finish the start: ranks run in step, timing ends, and random numbers start over."""
        if compile.is_compiled(self.vllm_config):
            logger.info("compiled: %s", ", ".join(f"{name} {value}" for name, value in self._compiled().items()))
        get_default_manager().lockstep = get_world_group().world_size > 1
        ranks.agree_on_replaced_operators()  # additions after the manifest: batches that compile, sizes of graphs
        ranks.agree_on_tactics()
        aten.seal()
        if aten.is_active():
            self._write_record()  # with the calls so far
        self.fl_eager_steps = eager_steps.of_worker(self.vllm_config, self.fl_models(), self.model_runner)
        set_random_seed(self.model_config.seed)

    def _compiled(self) -> dict[str, Any]:
        return compile.report(self.vllm_config, self.fl_counts_before)

    # -- serving ------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        self.fl_watched_steps.begin(scheduler_output)
        if self.fl_several_steps:
            scheduler_output = self.model_runner.fl_take(scheduler_output)
        self.fl_tokens = tokens = scheduler_output.total_num_scheduled_tokens
        eager = self.fl_eager_steps.step(tokens)
        with self._step(), cache_slots.step(tokens), eager, self.fl_watched_steps.step():
            return super().execute_model(scheduler_output)

    # vLLM's methods for new weights, whichever transfer backend writes them.

    def update_weights(self, update_info: Any) -> None:
        super().update_weights(update_info)
        weight_forms.weights_were_written()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        weight_forms.weights_were_written()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)
        weight_forms.weights_were_written()

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        runs = self.fl_several_steps or self.vllm_config.speculative_config is not None  # the model, or the draft model
        tokens = self.fl_tokens if self.fl_several_steps else 0
        with self._step() if runs else nullcontext(), cache_slots.step(tokens), self.fl_watched_steps.step():
            output = super().sample_tokens(grammar_output)
        self.fl_watched_steps.attach_report(output)
        return output

    def execute_dummy_batch(self) -> None:
        with self._step():
            super().execute_dummy_batch()

    def _step(self) -> AbstractContextManager[None]:
        """Return the context of a call that runs the model. Weights are written only between such calls.

        On GPUs vLLM's load balancing moves experts inside a call; no forms of experts are kept there.
        """
        return self.fl_weights.settled() if weight_forms.in_use() else nullcontext()

    # -- questions from outside, through LLM.collective_rpc -----------------------------------------------------------

    def fl_set_counting(self, on: bool = True) -> None:
        """Count calls from now on, starting at zero, or stop. In a compiled graph only opaque calls are counted."""
        manager = get_default_manager()
        manager.set_counting(on)
        manager.reset_counts()
        if manager.frozen:
            classes.bind_scopes(self.fl_models(), untraced_only=True)

    def fl_report(self) -> dict[str, Any]:
        """Return the report of this process's implementations, as plain data that vLLM can send between processes.

        The core's report, ``model_runner`` (``V1``, ``V2``), the languages of V2's ``runner_kernels``, and ``layers``
        and ``native_layers``: class name → number of layers with our forward, and with vLLM's. For a compiled model
        ``compiled`` counts compilations. If a scheduler call may make several steps, ``steps`` maps a number of steps
        to the number of such calls; ``single_steps`` is why none may, or empty.
        """
        return {
            "rank": self.rank,
            "model_runner": "V2" if self.use_v2_model_runner else "V1",
            "runner_kernels": model_runner.kernels(detect_device()) if self.use_v2_model_runner else None,
            **dispatch_report(),
            **self.fl_survey.as_data(),
            "steps": dict(self.model_runner.fl_made) if self.fl_several_steps else None,
            "single_steps": "" if self.fl_several_steps else several_steps.why_made_single(self.vllm_config),
            "compiled": self._compiled() if compile.is_compiled(self.vllm_config) else None,
        }

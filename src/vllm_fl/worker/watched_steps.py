"""Steps with each call checked, because one of their requests had NaN or infinity in its logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.config import CompilationMode
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from fl_dispatch import get_default_manager
from fl_dispatch.hosting.damage.verdicts import KEPT, StepReport, Wrong
from fl_dispatch.hosting.ranks.agreement import together
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.shadow import origin

from ..compilation import compile
from ..damage.messages import WATCH, attach
from ..layers import classes
from . import eager_steps

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

logger = get_logger(__name__)


class WatchedSteps:
    """One worker's handling of damaged requests.

    Args:
        vllm_config: the engine's configuration.
        model: the loaded model.
        runner: vLLM's model runner, V1 or V2.
    """

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, runner: Any) -> None:
        self.model, self.runner = model, runner
        self.shadow = get_default_manager().shadow
        self.wrong = Wrong(self.shadow.findings)
        self.watches = False
        replaced = vllm_config.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE  # the model's own forward
        self.can_watch = not replaced and vllm_config.parallel_config.data_parallel_size == 1  # other steps run graphs
        self.origins: list[origin.Origin] = []
        self.requests: Iterable[str] = ()

    def begin(self, scheduler_output: Any) -> None:
        """Watch a step if the scheduler marked it, as it does on all ranks."""
        self.requests = scheduler_output.num_scheduled_tokens
        self.watches, self.origins = self.can_watch and WATCH.find(scheduler_output) is not None, []

    def step(self) -> AbstractContextManager[None]:
        """Return the context for a part of the step that runs the model."""
        return self._watched() if self.watches and not self.origins else nullcontext()

    def attach_report(self, output: Any) -> None:
        """Attach to the step's output what the scheduler must know; nothing if all is right.

        A step without output leaves findings for the next one. vLLM reads the output of one rank alone, so another rank
        names the step's requests itself.
        """
        wrong, kept = ((), ()) if output is None and _is_read() else (self.wrong.new(), self.wrong.kept())
        if kept and not _is_read():
            logger.warning(KEPT, " and ".join(kept), ", ".join(self.requests))
        if not (self.watches or wrong or kept):
            return
        origins = None
        if self.watches:
            self.shadow.findings.begun(self.origins)
            origins = self.origins
            for group in (get_tp_group(), get_pp_group()):
                origins = together(group.cpu_group, origins)
        if output is not None:
            attach(output, StepReport(None if origins is None else tuple(origins), wrong, kept))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with origin.watching(get_default_manager().state) as found:
            classes.bind_scopes(self.model)
            with compile.uncompiled(self.model), eager_steps.without_graphs(self.runner):
                yield
        classes.bind_scopes(self.model)
        self.origins += found.values()


def _is_read() -> bool:
    """Whether vLLM reads the output of this rank."""
    return bool(get_tp_group().is_first_rank and get_pp_group().is_last_rank)

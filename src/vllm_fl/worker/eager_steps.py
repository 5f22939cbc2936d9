"""Eager steps for shadow mode: one step in N of a compiled or captured engine runs eagerly, so that its calls are seen.

In compiled code an operator is traced, and a graph replays kernels: neither makes a call. N is the reciprocal of the
share. The whole time of such a step counts as cost, so steps are further apart if the budget requires it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.config import CompilationMode
from vllm.distributed.parallel_state import get_world_group

from fl_dispatch import get_default_manager
from fl_dispatch.hosting.layers.attribute import replaced
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.shadow.sampling import Sampling

from ..compilation import compile

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

logger = get_logger(__name__)


class EagerSteps:
    """Draws the steps.

    Args:
        sampling: shadow mode's sampling.
        model: the loaded model.
        runner: vLLM's model runner, V1 or V2.
    """

    def __init__(self, sampling: Sampling, model: nn.Module, runner: Any) -> None:
        self.sampling, self.model, self.runner = sampling, model, runner
        self.gaps = sampling.gaps("step")
        self.left = next(self.gaps)

    def step(self, tokens: int) -> AbstractContextManager[None]:
        """Return the context for a step of the scheduler with ``tokens`` tokens."""
        if not tokens:
            return nullcontext()
        self.left -= 1
        if self.left > 0:
            return nullcontext()
        self.left = next(self.gaps)
        return self._eager() if self.sampling.affordable() else nullcontext()

    @contextmanager
    def _eager(self) -> Iterator[None]:
        """Run a step without compiled code and graphs, in which every call may be compared, and charge its time."""
        sampling = self.sampling
        began, compared = sampling.clock(), sampling.seconds
        sampling.every_call = True
        try:
            with compile.uncompiled(self.model), without_graphs(self.runner):
                yield
        finally:
            sampling.every_call = False
            sampling.charge(max(0.0, sampling.clock() - began - (sampling.seconds - compared)))


class NoEagerSteps:
    """Stand-in without eager steps."""

    def step(self, tokens: int) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()


def of_worker(vllm_config: VllmConfig, model: nn.Module, runner: Any) -> EagerSteps | NoEagerSteps:
    """Return eager steps if shadow mode is on and could not see the calls of other steps."""
    sampling, compilation = get_default_manager().shadow.sampling, vllm_config.compilation_config
    if sampling is None or not (compile.is_compiled(vllm_config) or compile.is_captured(vllm_config)):
        return NoEagerSteps()
    if get_world_group().world_size > 1:
        return _without("ranks run in step, and they would have to agree on the steps")
    if compilation.mode == CompilationMode.STOCK_TORCH_COMPILE:
        return _without("stock torch.compile replaces the model's own forward")
    return EagerSteps(sampling, model, runner)


def _without(reason: str) -> NoEagerSteps:
    logger.warning("shadow: no step runs eagerly, because %s; only opaque calls of compiled code are compared", reason)
    return NoEagerSteps()


@contextmanager
def without_graphs(runner: Any) -> Iterator[None]:
    """Hide all graphs from a model runner: V1 asks its dispatcher, V2 its manager."""
    places = (
        (getattr(runner, "cudagraph_dispatcher", None), "keys_initialized"),
        (getattr(runner, "cudagraph_manager", None), "_graphs_captured"),
    )
    with ExitStack() as stack:
        for owner, name in places:
            if getattr(owner, name, False):
                stack.enter_context(replaced(owner, **{name: False}))
        yield

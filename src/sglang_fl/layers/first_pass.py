"""Count calls in the first forward pass of a loaded model, to find operators that are never dispatched.

If the pass reached an operator's layers but never dispatched it, SGLang's own code runs silently in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import nn

from fl_dispatch import get_default_manager
from fl_dispatch.hosting.layers.layer_kernels import kernels
from fl_dispatch.logger_manager import get_logger

from ..attention import attention_backend, attention_layers
from ..runner_state import LOADED
from .classes import BRIDGE

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = get_logger(__name__)


@dataclass
class FirstPass:
    """A check of one forward pass: whether the claimed operators run.

    Args:
        claims: layer's prefix → the operator that it should run.
    """

    claims: dict[str, str]
    _before: dict[str, int] = field(default_factory=dict)
    _was_counting: bool = False
    _entered: set[str] = field(default_factory=set)
    _handles: list[Any] = field(default_factory=list)

    @classmethod
    def watch(cls, model: nn.Module, backend: AttentionBackend, inside: nn.Module | None = None) -> FirstPass:
        """Start counting, and record the entered modules with a claimed layer.

        The model and ``inside`` count as entered: the pass calls their forward directly, so no hook sees it.
        """
        modules = dict(model.named_modules())
        claims = {
            prefix: found.fl_operator for prefix, layer in modules.items() if (found := BRIDGE.find(layer)) is not None
        }
        claims |= {prefix: kernel.fl_operator for prefix, _, kernel in kernels(model)}
        if (ours := attention_backend.ours(backend)) is not None:
            claims.update(dict.fromkeys(dict(attention_layers.layers(model)), ours.operator))
        entered = {"", *(prefix for prefix, module in modules.items() if module is inside)}
        watch, manager = cls(claims, _entered=entered), get_default_manager()  # SGLang calls the model's forward itself
        watch._was_counting = manager.state.counter.on
        manager.set_counting(True)
        watch._before = watch._calls()
        for prefix in {_parent(prefix) for prefix in claims}:
            handle = modules[prefix].register_forward_pre_hook(lambda *_, entered=prefix: watch._entered.add(entered))
            watch._handles.append(handle)
        return watch

    @staticmethod
    def _calls() -> dict[str, int]:
        calls: Counter[str] = Counter()
        for (op_name, _), count in get_default_manager().call_counts().items():
            calls[op_name] += count
        return dict(calls)

    def finish(self) -> dict[str, list[str]]:
        """Stop watching; return operators that were claimed and reached but never dispatched, each with its layers."""
        for handle in self._handles:
            handle.remove()
        dispatched = {op for op, calls in self._calls().items() if calls > self._before.get(op, 0)}
        get_default_manager().set_counting(self._was_counting)
        missed: dict[str, list[str]] = {}
        for prefix, operator in self.claims.items():
            if operator not in dispatched and _parent(prefix) in self._entered:
                missed.setdefault(operator, []).append(prefix)
        return missed


def _parent(prefix: str) -> str:
    return prefix.rpartition(".")[0]


def watched(runner: ModelRunner, run: Callable[[], Any], inside: nn.Module | None = None) -> Any:
    """Run a forward pass, and record the first one's misses; the pass calls the forward of ``inside`` directly."""
    loaded = LOADED.of(runner)
    if loaded.undispatched is not None:
        return run()
    watch = FirstPass.watch(runner.model, runner.attn_backend, inside)
    try:
        result = run()
    finally:
        found = watch.finish()
    loaded.undispatched = found
    return result


def missed(runner: ModelRunner) -> dict[str, list[str]]:
    """Return operator → layers that the first pass missed."""
    return LOADED.of(runner).undispatched or {}


class UndispatchedError(RuntimeError):
    """A claimed operator that was never dispatched, in strict mode."""


def judge(missed: dict[str, list[str]], strict: bool) -> None:
    """Report the operators that the first pass missed.

    Raises:
        UndispatchedError: an operator was missed, and the mode is strict.
    """
    if not missed:
        return
    layers = "; ".join(f"'{op}' ({len(found)} layers, {found[0]})" for op, found in missed.items())
    text = (
        f"SGLang's own code runs in the place of operators that were to be dispatched: {layers}. This version of "
        "SGLang calls something else than what sglang_fl hooks, or computes these layers inside other kernels"
    )
    if strict:
        raise UndispatchedError(text)
    logger.warning("%s", text)

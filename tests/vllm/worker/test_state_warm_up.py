"""The start of a GPU meets what layers with a state will run: each implementation that is first, and its memory.

Batches and keys of kernels are those of ``test_warm_up.py``, for layers with a state.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.forward_context import create_forward_context, override_forward_context

from fl_dispatch import OpImpl, SelectionPolicy, get_default_manager, policy_context, reset_default_manager
from fl_dispatch.hosting.start import warm_batches
from fl_dispatch.settings import TunedRule
from fl_dispatch.types import BackendImplKind
from vllm_fl.compat import accelerator
from vllm_fl.layers import mamba1, mamba2
from vllm_fl.layers.states import Step
from vllm_fl.worker import warm_up

CPU, META = torch.device("cpu"), torch.device("meta")
TOKENS, REQUESTS = 300, 40
HEADS, HEAD_DIM, STATE, WIDTH = 4, 64, 128, 4
INNER = HEADS * HEAD_DIM
CHANNELS = INNER + 2 * STATE


class Mamba2(mamba2.StateSpaceLayer, torch.nn.Module):
    """Our part of ``MambaMixer2``, which gets what vLLM's projects."""

    def __init__(self, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> None:
        torch.nn.Module.__init__(self)
        make = {"dtype": dtype, "device": device}
        self.prefix, self.tp_size, self.activation = "layers.0", 1, "silu"
        self.head_dim, self.ssm_state_size, self.groups_ssm_state_size = HEAD_DIM, STATE, STATE
        self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size = INNER, CHANNELS, HEADS
        self.conv1d = SimpleNamespace(weight=torch.ones(CHANNELS, 1, WIDTH, **make), bias=torch.zeros(CHANNELS, **make))
        self.A, self.D, self.dt_bias = (torch.ones(HEADS, device=device) for _ in range(3))
        state = torch.zeros(3, HEADS, HEAD_DIM, STATE, device=device)
        self.kv_cache = torch.zeros(3, WIDTH - 1, CHANNELS, **make), state
        self.fl_bind(self.prefix)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = hidden.new_empty(len(hidden), INNER)
        self.conv_ssm_forward(hidden.new_zeros(len(hidden), INNER + CHANNELS + HEADS), output)
        return output


class Mamba1(mamba1.Mamba1Layer, torch.nn.Module):
    """Our part of ``MambaMixer``, with projections that make something of the right shape."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)
        make = {"dtype": dtype, "device": device}
        self.prefix, self.activation = "layers.0", "silu"
        self.in_proj = lambda hidden: (hidden.new_zeros(len(hidden), 2 * INNER), None)
        self.out_proj = lambda x: (x[:, :STATE], None)
        self._ssm_transform = lambda x: (x.new_zeros(INNER, len(x)), *(x.new_zeros(len(x), 16) for _ in range(2)))
        self.conv1d = SimpleNamespace(weight=torch.ones(INNER, 1, WIDTH, **make), bias=None)
        self.A, self.D = torch.ones(INNER, 16, device=device), torch.ones(INNER, device=device)
        self.dt_proj = SimpleNamespace(bias=torch.ones(INNER, device=device))
        self.kv_cache = torch.zeros(3, WIDTH - 1, INNER, **make), torch.zeros(3, INNER, 16, device=device)
        self.fl_bind(self.prefix)

    def forward(self, hidden: torch.Tensor, output: torch.Tensor) -> None:
        self.forward_impl(hidden, output)


def _config(tokens: int = TOKENS, requests: int = REQUESTS) -> Any:
    """The part of vLLM's configuration that the warm-up reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=requests),
        model_config=SimpleNamespace(get_hidden_size=lambda: STATE, dtype=torch.float32),
        compilation_config=SimpleNamespace(
            fast_moe_cold_start=False, static_all_moe_layers=[], static_forward_context={}
        ),
    )


# -- who is met -------------------------------------------------------------------------------------------------------

Met = dict[tuple[str, str], list[int]]


@pytest.fixture
def met() -> Iterator[Met]:
    """(operator, implementation) → rows of each call, for implementations ``default.1`` to ``3`` of the operators."""
    manager, found = get_default_manager(), Met()
    manager.ensure_initialized()
    for operator in mamba2.OPERATORS:
        fn = manager.registry.get_implementation(operator, "reference.torch").fn
        for number in (1, 2, 3):
            rows = found.setdefault((operator, f"default.{number}"), [])

            def counting(*args: Any, fn: Any = fn, rows: list[int] = rows) -> Any:
                rows.append(len(args[0]))
                return fn(*args)

            manager.registry.register_impl(
                OpImpl(operator, f"default.{number}", BackendImplKind.DEFAULT, counting, signature="unchecked")
            )
    yield found
    reset_default_manager()


def _rules(*bounds: tuple[int, int | None]) -> tuple[TunedRule, ...]:
    return tuple(TunedRule(order=(f"impl:default.{place}",), tokens=both) for place, both in enumerate(bounds, start=1))


def test_each_implementation_that_is_first_for_some_tokens_is_called_by_the_start(met: Met) -> None:
    accelerator.silence_accelerator()
    bounds = (9, 9), (11, 22), (27, None)
    policy = SelectionPolicy(op_tuned=tuple((operator, _rules(*bounds)) for operator in mamba2.OPERATORS))
    with policy_context(policy):
        runs = warm_up.states(torch.nn.ModuleList([Mamba2(), Mamba2()]), _config())
    assert runs == len(list(warm_batches.state_batches(TOKENS, REQUESTS, {9, 10, 11, 23, 27})))
    for operator in mamba2.OPERATORS:
        for place, (low, high) in enumerate(bounds, start=1):
            rows = met[operator, f"default.{place}"]
            assert low in rows, (operator, place)
            if place > 1:  # the first one is the rest's too
                assert all(low <= count <= (high or TOKENS) for count in rows)


def test_the_order_of_one_operator_is_who_the_start_calls_for_every_batch(met: Met) -> None:
    accelerator.silence_accelerator()
    order = {operator: ["impl:default.1"] for operator in mamba2.OPERATORS}
    with policy_context(SelectionPolicy.from_dict(per_op_order=order)):
        warm_up.states(Mamba2(), _config())
    batches = list(warm_batches.state_batches(TOKENS, REQUESTS))
    single = [one for one, _ in batches if one]
    prompts = [sum(lengths) for _, lengths in batches if lengths]
    for operator in mamba2.OPERATORS:
        assert met[operator, "default.1"] == (single if operator.endswith("update") else prompts)


# -- memory -----------------------------------------------------------------------------------------------------------


class Held(TorchDispatchMode):
    """The most bytes of new tensors that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
                self._add(tensor.nbytes)
                weakref.finalize(tensor, self._add, -tensor.nbytes)
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def _held(layer: Any, step: Step | None, rows: int) -> int:
    hidden = torch.empty(rows, STATE, dtype=torch.bfloat16, device=META)
    config = _config()
    described = None if step is None else {layer.prefix: step}
    with override_forward_context(create_forward_context(described, config)), Held() as held:
        layer.fl_try(hidden)
    return held.most


@pytest.mark.parametrize("kind", [Mamba2, Mamba1])
def test_as_much_memory_as_a_prompt_takes_is_taken_while_vllm_measures(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from fl_dispatch.backends.triton.impl.states import convolution
    from fl_dispatch.backends.triton.impl.states import state_space as kernels

    for module, name in (
        (convolution, "_launch"),
        (convolution, "_launch_keep"),
        (kernels, "_by_products"),
        (kernels, "_by_tokens"),
    ):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(kernels, "shared_memory", lambda device: 0)
    layer = kind(META, torch.bfloat16)
    layer.fl_convolve, layer.fl_scan = convolution.causal_conv1d, kernels.selective_scan
    rows = 512
    measured, real = _held(layer, None, rows), _held(layer, Step.of(0, (rows,), META), rows)
    assert real <= measured < 2 * real


def test_states_of_chunks_are_measured_for_who_keeps_some(met: Met) -> None:
    manager = get_default_manager()
    fn = manager.registry.get_implementation("selective_scan", "reference.torch").fn
    kept = OpImpl("selective_scan", "default.chunks", BackendImplKind.DEFAULT, fn, properties={"chunk": 256})
    manager.registry.register_impl(kept)
    layer, rows = Mamba2(META, torch.bfloat16), 513
    before = _held(layer, None, rows)
    with policy_context(SelectionPolicy.from_dict(per_op_order={"selective_scan": ["impl:default.chunks"]})):
        assert _held(layer, None, rows) - before == 3 * 2 * HEADS * HEAD_DIM * STATE * 4


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["selective_scan", "selective_state_update"])
def test_a_kernel_whose_limits_leave_a_models_calls_to_the_reference_is_none(operator: str, met: Met) -> None:
    accelerator.silence_accelerator()
    manager = get_default_manager()
    fn = manager.registry.get_implementation(operator, "reference.torch").fn
    for name, limit in (("wide", HEADS), ("narrow", HEADS - 1)):
        impl = OpImpl(
            operator,
            f"default.{name}",
            BackendImplKind.DEFAULT,
            fn,
            supports=lambda x, *rest, limit=limit: x.shape[1] <= limit or f"{x.shape[1]} heads",
            signature="unchecked",
        )
        manager.registry.register_impl(impl)
    layer = Mamba2()
    for name in ("wide", "narrow"):
        order = {each: ["impl:default.1"] for each in mamba2.OPERATORS}
        order[operator] = [f"impl:default.{name}", "reference"]
        with policy_context(SelectionPolicy.from_dict(per_op_order=order)):
            layer.fl_bind(layer.prefix)
            if name == "wide":
                assert warm_up.states(layer, _config()) > 0
                continue
            with pytest.raises(ValueError, match=f"only the reference takes its calls of '{operator}'.*{HEADS} heads"):
                warm_up.states(layer, _config())
    order[f"{operator}@{layer.prefix}"] = ["reference"]  # the user asks for it
    with policy_context(SelectionPolicy.from_dict(per_op_order=order)):
        layer.fl_bind(layer.prefix)
        assert warm_up.states(layer, _config()) > 0
    assert not any(hasattr(getattr(layer, part), "func") for part in layer.fl_parts)

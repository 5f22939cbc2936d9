"""Compiled code runs what the policy says: traced into, or behind a ``torch.library`` operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils._pytree import tree_leaves

from builders import impl
from fl_dispatch import (
    DispatchError,
    DispatchFrozenError,
    NotSupported,
    OpImpl,
    SelectionPolicy,
    bind_op,
    call_op,
    freeze_dispatch,
    get_default_manager,
    policy_context,
    resolve_op,
    set_global_policy,
    thaw_dispatch,
    weight_forms,
    with_preference,
)
from fl_dispatch.compiled import views as opaque
from fl_dispatch.manager.process import ROOT
from fl_dispatch.ops import OPERATORS, Mode, Sample
from fl_dispatch.ops.quantization import FP4
from fl_dispatch.settings import TunedRule
from sampling import drawn

pytestmark = pytest.mark.usefixtures("results_are_names")

INLINE = [op.name for op in OPERATORS.values() if Mode.INLINE in op.modes]
_ALL_OPAQUE = [op.name for op in OPERATORS.values() if Mode.OPAQUE in op.modes]
OPAQUE = drawn(_ALL_OPAQUE, len(_ALL_OPAQUE) // 2, "views of operators")
OP = "mul_and_silu"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    thaw_dispatch()


def samples(op: str, seed: int = 0) -> list[Sample]:
    made = OPERATORS[op].samples
    assert made is not None
    return list(made(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(seed)))


def serving(op: str) -> list[tuple[Sample, Sample]]:
    """Two equal copies of the serving samples, because a call may overwrite its arguments."""
    return [pair for pair in zip(samples(op), samples(op), strict=True) if pair[0].serving]


def share_types(sample: Sample) -> bool:
    """Whether tensors of different types lie in one memory."""
    types: dict[int, set[torch.dtype]] = {}
    for tensor in flat(sample.args):
        types.setdefault(tensor.untyped_storage().data_ptr(), set()).add(tensor.dtype)
    return any(len(kinds) > 1 for address, kinds in types.items() if address)


def args_of(op: str, *, writing: bool) -> tuple[Any, ...]:
    """Arguments of the smallest sample for the view that writes, or for the one that does not.

    PyTorch's checks compare arguments, which it cannot do with two numbers in a byte.
    """
    operator = OPERATORS[op]
    bound = [operator.bind(sample.args, {}) for sample in samples(op)]
    full = [args for args in bound if all(tensor.numel() and tensor.dtype is not FP4 for tensor in flat(args))]
    fitting = [args for args in full if bool(operator.written(args)) is writing]
    return min(fitting, key=lambda args: sum(tensor.numel() for tensor in flat(args)))


def same(got: Any, expected: Any, got_args: Any = (), expected_args: Any = ()) -> None:
    """Results, and tensors among arguments, are equal bit for bit."""
    for one, two in zip(flat((got, *got_args)), flat((expected, *expected_args)), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def flat(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


VIEWS = [(op, variant) for op in OPAQUE for variant in opaque.variants(OPERATORS[op])]


# ---- inline ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", INLINE)
def test_an_inline_operator_is_traced_whole_by_name_and_bound_and_for_any_number_of_tokens(op: str) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    by_name = torch.compile(lambda *args: call_op(op, *args), fullgraph=True, backend=counter, dynamic=True)
    bound = torch.compile(bind_op(op), fullgraph=True, backend="eager", dynamic=True)
    reference = resolve_op(op, *samples(op)[0].args)
    for sample, again in serving(op)[:3]:
        twin = samples(op)[[s.label for s in samples(op)].index(sample.label)]
        expected = reference(*twin.args)
        same(by_name(*sample.args), expected, sample.args, twin.args)
        same(bound(*again.args), expected, again.args, twin.args)
    assert counter.frame_count > 0
    assert counter.op_count > 0


def test_a_policy_change_reaches_compiled_code_and_a_known_policy_is_not_compiled_again() -> None:
    get_default_manager().registry.register_many(
        [impl("default.a", lambda x: x + 1, op="relu2"), impl("vendor.b", lambda x: x + 2, op="relu2")]
    )
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x: call_op("relu2", x), fullgraph=True, backend=counter)
    for _ in range(3):
        assert compiled(torch.zeros(1)).item() == 1
        with with_preference("vendor"):
            assert compiled(torch.zeros(1)).item() == 2
        set_global_policy(SelectionPolicy(prefer="vendor"))
        assert compiled(torch.zeros(1)).item() == 2
        set_global_policy(SelectionPolicy())
    assert counter.frame_count <= 4  # one for each way to reach a table: by the root, and by a context


def test_under_frozen_dispatch_a_change_between_two_calls_of_compiled_code_is_refused() -> None:
    get_default_manager().registry.register_many(
        [impl("default.a", lambda x: x + 1, op="relu2"), impl("vendor.b", lambda x: x + 2, op="relu2")]
    )
    freeze_dispatch()
    compiled = torch.compile(lambda x: call_op("relu2", x), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == 1
    with pytest.raises(DispatchFrozenError, match="relu2"):
        set_global_policy(SelectionPolicy(prefer="vendor"))
    assert compiled(torch.zeros(1)).item() == 1


# ---- opaque views ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "variant"), VIEWS, ids=[variant.name for _, variant in VIEWS])
def test_a_view_passes_the_checks_of_torch(op: str, variant: opaque.Variant) -> None:
    opaque.view(ROOT, OPERATORS[op])
    values = dict(zip(OPERATORS[op].parameters, args_of(op, writing=bool(variant.writes)), strict=True))
    torch_op = getattr(torch.ops.fl_dispatch, variant.name).default
    torch.library.opcheck(
        torch_op,
        (*(values[name] for name in variant.parameters), ""),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("op", OPAQUE)
def test_a_view_computes_and_writes_what_the_operator_does_on_every_sample(op: str) -> None:
    call = opaque.view(ROOT, OPERATORS[op])
    for sample, again in zip(samples(op), samples(op), strict=True):
        reference = resolve_op(op, *again.args)
        got, expected = call(*OPERATORS[op].bind(sample.args, {})), reference(*again.args)
        written = OPERATORS[op].written(OPERATORS[op].bind(again.args, {}))
        if (
            written and got is not None
        ):  # the operator leaves open whether its inputs hold the results, the view does not
            same(got, expected)
        else:
            same(got, expected, sample.args, again.args)


@pytest.mark.parametrize("op", OPAQUE)
def test_compiled_code_runs_an_implementation_that_cannot_be_traced_behind_the_view(op: str) -> None:
    reference, calls = resolve_op(op, *samples(op)[0].args), []

    def untraceable(*args: Any) -> Any:
        calls.append(torch.compiler.is_dynamo_compiling())
        return reference(*args)

    get_default_manager().registry.register_impl(
        impl("vendor.closed", torch._dynamo.disable(untraceable), op=op, opaque=True, signature="unchecked")
    )
    set_global_policy(SelectionPolicy(per_op_order=((op, ("vendor:closed",)),)))
    compiled = torch.compile(bind_op(op), fullgraph=True, backend="aot_eager", dynamic=True)
    # AOTAutograd traces no writes to views of one memory in several types, as keys with their scales behind them are.
    apart = [pair for pair in serving(op) if not share_types(pair[0])][:2]
    for sample, again in apart:
        same(compiled(*sample.args), reference(*again.args))
    assert len(calls) == len(apart) > 0
    assert not any(calls)


@pytest.mark.parametrize("op", ["rms_norm", "rotary_embedding", "silu_and_mul"])
def test_inductor_runs_the_views(op: str) -> None:
    reference, calls = resolve_op(op, *samples(op)[0].args), []

    def closed(*args: Any) -> Any:
        calls.append(op)
        return reference(*args)

    get_default_manager().registry.register_impl(
        impl("vendor.closed", closed, op=op, opaque=True, signature="unchecked")
    )
    set_global_policy(SelectionPolicy(prefer="vendor"))
    compiled = torch.compile(lambda *args: call_op(op, *args), fullgraph=True)
    ways = (False, True) if OPERATORS[op].writes else (False,)
    for writing in ways:
        expected = reference(*args_of(op, writing=writing))
        same(compiled(*args_of(op, writing=writing)), expected)
    assert calls == [op] * len(ways)


def test_behind_a_view_a_policy_change_needs_no_new_graph() -> None:
    for impl_id, value in (("default.a", 1), ("vendor.b", 2)):
        get_default_manager().registry.register_impl(
            impl(
                impl_id,
                torch._dynamo.disable(lambda x, value=value: x[..., ::2] + value),
                op=OP,
                opaque=True,
                signature="unchecked",
            )
        )
    counter = torch._dynamo.testing.CompileCounter()
    view = opaque.view(ROOT, OPERATORS[OP])
    compiled = torch.compile(view, fullgraph=True, backend=counter)
    assert compiled(torch.zeros(1, 2)).item() == 1
    with with_preference("vendor"):
        assert compiled(torch.zeros(1, 2)).item() == 2
    assert counter.frame_count == 1


def test_a_conditional_choice_is_made_anew_in_every_call_of_compiled_code() -> None:
    get_default_manager().registry.register_many(
        [impl("default.a", lambda x: x[..., ::2] + 1, op=OP), impl("vendor.b", lambda x: x[..., ::2] + 2, op=OP)]
    )
    rule = TunedRule(order=("vendor:b",), dtype=None, tokens=(1, 4), phase=None)
    set_global_policy(SelectionPolicy(op_tuned=((OP, (rule,)),)))
    freeze_dispatch()
    compiled = torch.compile(bind_op(OP), fullgraph=True, backend="aot_eager", dynamic=True)
    assert [compiled(torch.zeros(tokens, 2))[0, 0].item() for tokens in (3, 5, 4, 9)] == [2, 1, 2, 1]


def test_a_predicate_is_asked_in_every_call_once_guards_may_be_dropped() -> None:
    get_default_manager().registry.register_many(
        [
            impl("default.a", lambda x: x[..., ::2] + 1, op=OP, supports=lambda x: x.shape[0] > 4),
            impl("vendor.b", lambda x: x[..., ::2] + 2, op=OP),
        ]
    )
    freeze_dispatch()
    dropped = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}  # as vLLM does
    compiled = torch.compile(bind_op(OP), fullgraph=True, backend="inductor", dynamic=True, options=dropped)
    assert [compiled(torch.zeros(tokens, 2))[0, 0].item() for tokens in (9, 3, 5)] == [1, 2, 1]


def test_a_rule_for_one_layer_holds_behind_the_view() -> None:
    for impl_id, value in (("default.a", 1), ("vendor.b", 2)):
        get_default_manager().registry.register_impl(
            impl(impl_id, lambda x, value=value: x[..., ::2] + value, op=OP, opaque=True, signature="unchecked")
        )
    set_global_policy(SelectionPolicy(per_op_order=((f"{OP}@model.layers.1.*", ("vendor",)),)))
    layers = [bind_op(OP, f"model.layers.{layer}.act") for layer in range(2)]
    compiled = torch.compile(lambda x: tuple(layer(x) for layer in layers), fullgraph=True, backend="aot_eager")
    assert [value.item() for value in compiled(torch.zeros(1, 2))] == [1, 2]


def test_a_view_falls_back_and_restores_like_any_call() -> None:
    def overwrites(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Any:
        x.fill_(7)
        raise RuntimeError("broken")

    get_default_manager().registry.register_impl(
        impl("vendor.bad", overwrites, op="rms_norm", opaque=True, signature="unchecked")
    )
    set_global_policy(SelectionPolicy(prefer="vendor"))
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.ones(8)
    with policy_context(SelectionPolicy(prefer="reference")):
        expected = call_op("rms_norm", x.clone(), residual.clone(), weight, 1e-6)
    compiled = torch.compile(bind_op("rms_norm"), fullgraph=True, backend="aot_eager")
    same(compiled(x, residual, weight, 1e-6), expected)
    assert get_default_manager().get_failed_impls() == {"rms_norm": {"vendor.bad"}}


@pytest.mark.parametrize("result", ["itself", "a view"])
def test_a_result_that_shares_memory_with_an_argument_is_copied(result: str) -> None:
    def sharing(x: Tensor) -> Tensor:
        return x if result == "itself" else x.view(x.shape)

    get_default_manager().registry.register_impl(impl("vendor.sharing", sharing, op="relu2"))
    set_global_policy(SelectionPolicy(prefer="vendor"))
    x = torch.randn(2, 4)
    got = opaque.view(ROOT, OPERATORS["relu2"])(x)
    same(got, sharing(x))
    assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("op", ["linear", "fused_linear"])
def test_a_view_asks_for_no_weights_address_so_that_it_stays_prepared(op: str) -> None:
    weight = torch.randn(8, 16)
    weight_forms.declare(weight)
    made = [weight_forms.of(weight, "a", lambda now, before: now.clone())]
    set_global_policy(SelectionPolicy(prefer="reference"))
    call, x = opaque.view(ROOT, OPERATORS[op]), torch.randn(1, 16)
    more = (None,) if op == "linear" else (None, None, None, torch.randn(16), torch.randn(1, 16), 1e-6, True)
    for _ in range(3):
        call(x, weight, *more)
        made.append(weight_forms.of(weight, "a", lambda now, before: now.clone()))
    assert all(one is made[0] for one in made)


def test_a_result_among_several_that_is_a_weight_is_copied() -> None:
    def sharing(*args: Any) -> tuple[Tensor, Tensor]:
        return args[1], args[0].new_empty(0)

    get_default_manager().registry.register_impl(
        impl("vendor.sharing", sharing, op="fused_linear", signature="unchecked")
    )
    set_global_policy(SelectionPolicy(prefer="vendor"))
    weight = torch.randn(16, 16)
    more = (None, None, None, None, None, 1e-6, False)
    y, _ = opaque.view(ROOT, OPERATORS["fused_linear"])(torch.randn(16, 16), weight, *more)
    same(y, weight)
    assert y.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()


def test_results_that_come_back_in_each_others_arguments_are_put_right() -> None:
    def swapping(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Any:
        y, s = (x + residual) * 10, x + residual
        residual.copy_(y)
        x.copy_(s)
        return residual, x

    get_default_manager().registry.register_impl(
        impl("vendor.swapping", swapping, op="rms_norm", signature="unchecked")
    )
    set_global_policy(SelectionPolicy(prefer="vendor"))
    x, residual = torch.full((1, 2), 1.0), torch.full((1, 2), 2.0)
    y, s = opaque.view(ROOT, OPERATORS["rms_norm"])(x, residual, torch.ones(2), 1e-6)
    assert (y is x, s is residual) == (True, True)
    assert (x.tolist(), residual.tolist()) == ([[30.0, 30.0]], [[3.0, 3.0]])


@pytest.mark.parametrize("op", OPAQUE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fake_function_tells_shape_dtype_and_strides_of_every_view(op: str, dtype: torch.dtype) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    operator = OPERATORS[op]
    assert operator.samples is not None
    call = opaque.view(ROOT, operator)
    for sample in operator.samples(dtype, torch.device("cpu"), torch.Generator().manual_seed(1)):
        args = operator.bind(sample.args, {})
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = call(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        real = call(*args)
        for one, two in zip(*((r if isinstance(r, tuple) else (r,)) for r in (fake, real)), strict=True):
            if two is None:
                assert one is None
            else:
                assert (one.shape, one.dtype, one.stride()) == (two.shape, two.dtype, two.stride()), sample.label


def test_a_layer_first_call_is_traced_whole_before_and_after_its_class_is_known() -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((8,), 2.0), requires_grad=False)
            self.variance_epsilon = 1e-5

        def forward(self, x: Tensor) -> Any:
            return call_op("rms_norm", self, x)

    layer, x = Norm(), torch.randn(3, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    first = compiled(x)
    same(first, layer(x))
    torch._dynamo.reset()
    same(torch.compile(layer, fullgraph=True, backend="eager")(x), first)


def test_a_predicate_over_a_dynamic_size_holds_in_compiled_code_as_it_does_outside() -> None:
    get_default_manager().registry.register_impl(
        impl("default.a", lambda x: x[..., ::2] + 1, op=OP, supports=lambda x: x.shape[0] >= 2)
    )
    compiled = torch.compile(bind_op(OP), fullgraph=True, backend="eager", dynamic=True)
    x = torch.full((4, 2), 2.0)
    assert compiled(x)[0, 0].item() == bind_op(OP)(x)[0, 0].item() == 3


def test_a_ban_in_one_layer_holds_behind_the_view() -> None:
    broken = {"now": True}

    def first(x: Tensor) -> Tensor:
        if broken["now"]:
            raise RuntimeError("broken")
        return x[..., ::2] + 1

    get_default_manager().registry.register_many(
        [
            impl("default.a", first, op=OP, opaque=True),
            impl("vendor.b", lambda x: x[..., ::2] + 2, op=OP),
        ]
    )
    layers = [bind_op(OP, f"model.layers.{layer}.act") for layer in range(2)]
    assert layers[1](torch.zeros(1, 2)).item() == 2
    broken["now"] = False
    freeze_dispatch()
    compiled = torch.compile(lambda x: tuple(layer(x) for layer in layers), fullgraph=True, backend="aot_eager")
    assert [value.item() for value in compiled(torch.zeros(1, 2))] == [1, 2]


def test_layers_of_other_classes_do_not_make_a_graph_anew() -> None:
    def norm() -> Any:
        layer = type("Norm", (torch.nn.Module,), {})()
        layer.weight, layer.variance_epsilon = torch.ones(8), 1e-5
        return layer

    counter, layer, x = torch._dynamo.testing.CompileCounter(), norm(), torch.randn(2, 8)
    compiled = torch.compile(lambda x: call_op("rms_norm", layer, x), fullgraph=True, backend=counter)
    call_op("rms_norm", layer, x)
    compiled(x)
    for _ in range(4):
        call_op("rms_norm", norm(), x)
        compiled(x)
    assert counter.frame_count == 1


@pytest.mark.parametrize("declining", [1, 2])
def test_an_implementation_that_declines_while_it_is_traced_leaves_the_call_to_the_next(declining: int) -> None:
    def declines(x: Tensor) -> Tensor:
        raise NotSupported("not these")

    names = ("default.a", "default.b")[:declining]
    get_default_manager().registry.register_many(
        [*(impl(name, declines, op=OP) for name in names), impl("vendor.c", lambda x: x[..., ::2] + 2, op=OP)]
    )
    for function in (bind_op(OP), lambda x: call_op(OP, x)):
        torch._dynamo.reset()
        assert torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(1, 2)).item() == 2


@pytest.mark.parametrize("error", [NotImplementedError("late"), RuntimeError("late")], ids=["declines", "fails"])
def test_one_that_may_have_written_before_it_raised_in_a_trace_has_no_next(error: Exception) -> None:
    def spoils(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Any:
        x.fill_(9)
        raise error

    get_default_manager().registry.register_impl(
        impl("default.a", spoils, op="rms_norm", signature="unchecked", opaque=False)
    )
    arguments = torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-6
    compiled = torch.compile(bind_op("rms_norm"), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="late|Unsupported|exception"):
        compiled(*arguments)


def register_proven(made: OpImpl) -> None:
    """Register one whose first result was as declared, so that its results are compared behind views alone."""
    get_default_manager().registry.register_impl(made)
    get_default_manager().state.prove(made, wrote=False)


def test_integers_behind_a_view_have_the_declared_dtype() -> None:
    def wide(logits: Tensor, topk: int, *rest: Any) -> Any:
        return torch.ones(len(logits), topk), torch.arange(topk).repeat(len(logits), 1)

    register_proven(impl("vendor.wide", wide, op="topk_softmax", opaque=True, signature="unchecked"))
    set_global_policy(SelectionPolicy(prefer="vendor"))
    with pytest.raises(DispatchError, match="vendor.wide of topk_softmax.*int64, int32 is declared"):
        opaque.view(ROOT, OPERATORS["topk_softmax"])(*OPERATORS["topk_softmax"].bind((torch.randn(2, 8), 2), {}))


@pytest.mark.parametrize("wrong", [lambda x: x[..., ::2].double(), lambda x: x], ids=["dtype", "shape"])
def test_a_result_that_is_not_as_declared_is_an_error_that_names_the_implementation(wrong: Any) -> None:
    register_proven(impl("vendor.wrong", wrong, op=OP, opaque=True))
    set_global_policy(SelectionPolicy(prefer="vendor"))
    with pytest.raises(DispatchError, match=f"vendor.wrong of {OP}.* is declared"):
        opaque.view(ROOT, OPERATORS[OP])(torch.zeros(2, 4))


def test_a_result_in_other_strides_is_made_contiguous_for_compiled_code() -> None:
    def transposed(x: Tensor) -> Tensor:
        return (x[..., ::2] + 1).t().contiguous().t()

    register_proven(impl("vendor.strided", transposed, op=OP, opaque=True))
    set_global_policy(SelectionPolicy(prefer="vendor"))
    compiled = torch.compile(lambda x: call_op(OP, x) * 2, fullgraph=True)
    same(compiled(torch.zeros(4, 6)), torch.full((4, 3), 2.0))

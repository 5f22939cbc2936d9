"""Implementations with one fault each: the reference, and one mutation of its arguments or of its results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fl_dispatch import weight_forms
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.ops import OPERATORS

REFERENCE = ReferenceBackend()
Mutation = Callable[[Callable[[SimpleNamespace], Any], SimpleNamespace], Any]


@dataclass(frozen=True)
class Fault:
    """A fault, the operator that it is planted in, and a dtype in which it shows.

    Args:
        name: what is wrong.
        op: the operator.
        dtype: in which it is looked for.
        mutation: calls the right implementation with the arguments by name, and spoils one of the two.
        probes: whether it is looked for in the declaration's probes too.
    """

    name: str
    op: str
    dtype: torch.dtype
    mutation: Mutation
    probes: bool = True

    def implementation(self) -> Callable[..., Any]:
        """The faulty implementation, with any parameters."""
        operator, right = OPERATORS[self.op], getattr(REFERENCE, self.op)
        names = [name for name in operator.operands(tuple(operator.parameters)) if name not in operator.later]

        def call(given: SimpleNamespace) -> Any:
            return right(*(getattr(given, name) for name in names))

        def faulty(*args: Any) -> Any:
            return self.mutation(call, SimpleNamespace(**dict(zip(names, args, strict=True))))

        return faulty


FAULTS: list[Fault] = []


def planted(
    name: str, *ops: str, dtype: torch.dtype = torch.float32, probes: bool = True
) -> Callable[[Mutation], Mutation]:
    """Plant a fault in one operator or in several."""

    def plant(mutation: Mutation) -> Mutation:
        FAULTS.extend(Fault(name, op, dtype, mutation, probes) for op in ops)
        return mutation

    return plant


def restrided(tensor: Tensor, *strides: int) -> Tensor:
    """The same memory read with other strides, as far as the memory reaches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided(tensor.shape, strides) if tensor.numel() and last < room else tensor


def as_if_contiguous(tensor: Tensor) -> Tensor:
    return restrided(tensor, *torch.empty(tensor.shape, device="meta").stride())


# -- strides ----------------------------------------------------------------------------------------------------------


@planted("strides of x beside a residual are ignored", "rms_norm", "gemma_rms_norm")
def _(right: Any, a: SimpleNamespace) -> Any:
    if a.residual is not None:
        a.x = as_if_contiguous(a.x)
    return right(a)


@planted("strides of the residual are ignored", "rms_norm", "gemma_rms_norm")
def _(right: Any, a: SimpleNamespace) -> Any:
    if a.residual is not None:
        a.residual = as_if_contiguous(a.residual)
    return right(a)


@planted("one row stride for three dimensions", "rms_norm", "gemma_rms_norm", "layer_norm", "silu_and_mul", "linear")
def _(right: Any, a: SimpleNamespace) -> Any:
    if a.x.dim() == 3:
        a.x = restrided(a.x, a.x.shape[1] * a.x.stride(1), a.x.stride(1), a.x.stride(2))
    return right(a)


@planted("the result has other strides than declared", "silu_and_mul", "rms_norm")
def _(right: Any, a: SimpleNamespace) -> Any:
    y = right(a)
    return y.mT.contiguous().mT if isinstance(y, Tensor) and y.dim() == 3 else y


# -- arguments --------------------------------------------------------------------------------------------------------


@planted("epsilon is ignored", "rms_norm", "gemma_rms_norm", "layer_norm")
def _(right: Any, a: SimpleNamespace) -> Any:
    a.epsilon = 1e-6
    return right(a)


@planted("an argument is written that must only be read", "rms_norm", "layer_norm")
def _(right: Any, a: SimpleNamespace) -> Any:
    y = right(a)
    if a.weight is not None:
        a.weight += 1
    return y


@planted("max_seq_len is taken for exact", "paged_attention", "mla_decode")
def _(right: Any, a: SimpleNamespace) -> Any:
    a.seq_lens = (
        torch.where(a.seq_lens == a.seq_lens.amax(), a.max_seq_len, a.seq_lens) if len(a.seq_lens) else a.seq_lens
    )
    return right(a)


# -- sizes ------------------------------------------------------------------------------------------------------------


@planted("columns beyond 4,096 are wrong", "silu_and_mul", "gelu_and_mul", "gelu")
def _(right: Any, a: SimpleNamespace) -> Any:
    y = right(a)
    y[..., 4096:] = 0
    return y


@planted("wrong with 4,096 tokens and more", "silu_and_mul", "rms_norm", "rotary_embedding")
def _(right: Any, a: SimpleNamespace) -> Any:
    y = right(a)
    first = y if isinstance(y, Tensor) else y[0]
    if len(first) >= 4096:
        first[-1] = 0
    return y


@planted("rows beyond 8,192 are wrong", "silu_and_mul", "rms_norm", "gemma_rms_norm")
def _(right: Any, a: SimpleNamespace) -> Any:
    y = right(a)
    (y if isinstance(y, Tensor) else y[0])[8192:] = 0
    return y


@planted("wrong at a hidden size of 8,192", "rms_norm", "gemma_rms_norm", "layer_norm")
def _(right: Any, a: SimpleNamespace) -> Any:
    if a.x.shape[-1] >= 8192:
        a.epsilon = 0.1
    return right(a)


@planted("keys beyond 1,024 are ignored", "paged_attention", "mla_decode")
def _(right: Any, a: SimpleNamespace) -> Any:
    if a.max_query_len == 1:
        a.seq_lens = a.seq_lens.clamp(max=1024)
    return right(a)


@planted("the last token of each list is missed", "index_topk")
def _(right: Any, a: SimpleNamespace) -> Any:
    y = right(a)
    last = (y >= 0).sum(-1, keepdim=True) - 1
    return y.masked_fill_((last >= 0) & (torch.arange(y.shape[1]) == last), -1)


@planted("a chunk of a prompt lists its own tokens alone", "index_topk")
def _(right: Any, a: SimpleNamespace) -> Any:
    y, new = right(a), a.query_start_loc.diff()
    for begin, count, length in zip(a.query_start_loc.tolist(), new.tolist(), a.seq_lens.tolist(), strict=False):
        if count > 1:
            rows = y[begin : begin + count]
            rows[rows < length - count] = -1
    return y


@planted("a query lists the token behind it", "index_topk")
def _(right: Any, a: SimpleNamespace) -> Any:
    a.seq_lens = torch.minimum(a.seq_lens + 1, torch.full_like(a.seq_lens, a.max_seq_len))
    return right(a)


@planted("of equal scores the higher position is listed", "index_topk")
def _(right: Any, a: SimpleNamespace) -> Any:
    y, size = right(a), a.key_cache.shape[1]
    for request, length in enumerate(a.seq_lens.tolist()):
        begin, end = a.query_start_loc[request : request + 2].tolist()
        keys = a.key_cache[a.block_table[request, : -(-length // size)]].flatten(0, 1)[:length].float()
        for row in range(begin, end):
            seen = length - end + row + 1
            products = (keys[:seen] @ a.query[row].float().T).relu()
            best = (products @ a.weights[row]).flip(0).sort(descending=True, stable=True).indices[: a.topk]
            y[row, : len(best)] = (seen - 1 - best).sort().values.int()
    return y


@planted("listed tokens beyond 1,024 are ignored", "mla_sparse")
def _(right: Any, a: SimpleNamespace) -> Any:
    a.positions = a.positions[:, :1024]
    return right(a)


@planted("a list ends one token early", "mla_sparse")
def _(right: Any, a: SimpleNamespace) -> Any:
    last = (a.positions >= 0).sum(-1, keepdim=True) - 1
    a.positions = a.positions.masked_fill(torch.arange(a.positions.shape[1]) == last, -1)
    return right(a)


@planted("scales are not powers of two", "index_key_write")
def _(right: Any, a: SimpleNamespace) -> Any:
    right(a)
    if a.key_scales is not None:
        a.key_scales *= 1.01


# -- memory -----------------------------------------------------------------------------------------------------------

_kept: dict[Any, Tensor] = {}


@planted("the result lies where the last one did", "silu_and_mul", "linear")
def _(right: Any, a: SimpleNamespace) -> Any:
    y = right(a)
    return _kept.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


@planted("reads past a row, with weight 0", "silu_and_mul", "rms_norm", "linear")
def _(right: Any, a: SimpleNamespace) -> Any:
    width, y = a.x.shape[-1], right(a)
    room = a.x.untyped_storage().nbytes() // a.x.element_size()
    last = a.x.storage_offset() + sum((n - 1) * s for n, s in zip(a.x.shape, a.x.stride(), strict=True))
    if isinstance(y, Tensor) and a.x.numel() and a.x.stride(-1) == 1 and last + 1 < room:
        y = y + 0 * a.x.as_strided((*a.x.shape[:-1], width + 1), a.x.stride())[..., -1:]
    return y


@planted("unused slots of the last block enter with weight 0", "paged_attention", "mla_decode")
def _(right: Any, a: SimpleNamespace) -> Any:
    y, cache = right(a), a.value_cache if hasattr(a, "value_cache") else a.kv_cache
    for row, length in zip(a.block_table, a.seq_lens.tolist(), strict=True):
        if length:
            y += 0 * cache[row[-(-length // cache.shape[1]) - 1]].sum()
    return y


@planted("the whole block table is read", "paged_attention", "mla_decode")
def _(right: Any, a: SimpleNamespace) -> Any:
    cache = a.value_cache if hasattr(a, "value_cache") else a.kv_cache
    cache[a.block_table.long()]
    return right(a)


# -- numbers ----------------------------------------------------------------------------------------------------------


def converted(a: SimpleNamespace, dtype: torch.dtype) -> SimpleNamespace:
    """The arguments with their floating tensors in another dtype."""
    fields = vars(a).items()
    return SimpleNamespace(
        **{n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in fields}
    )


def truncated(y: Tensor) -> Tensor:
    """float32 cut off to bfloat16."""
    return (y.float().view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


@planted("float32 is computed in bfloat16", "silu_and_mul", "rms_norm", "linear", "paged_attention")
def _(right: Any, a: SimpleNamespace) -> Any:
    if a.__dict__.get("out") is not None:
        return right(a)
    y = right(converted(a, torch.bfloat16))
    return y.float() if isinstance(y, Tensor) else tuple(one.float() for one in y)


@planted(
    "truncated instead of rounded",
    "silu_and_mul", "rms_norm", "layer_norm", "linear", "paged_attention", "moe_sum", "fused_moe",
    dtype=torch.bfloat16,
)  # fmt: skip
def _(right: Any, a: SimpleNamespace) -> Any:
    if a.__dict__.get("out") is not None:
        return right(a)
    y = right(converted(a, torch.float32))
    return truncated(y) if isinstance(y, Tensor) else tuple(map(truncated, y))


@planted("an expert has the scales of the one before", "scaled_moe", "weight_only_moe")
def _(right: Any, a: SimpleNamespace) -> Any:
    a.w2_scale = a.w2_scale.roll(1, 0)
    return right(a)


@planted("zero points are those of the group before", "weight_only_moe")
def _(right: Any, a: SimpleNamespace) -> Any:
    a.w13_zero = None if a.w13_zero is None else a.w13_zero.roll(1, -1)
    return right(a)


@planted("all rows of an expert have one scale", "scaled_moe")
def _(right: Any, a: SimpleNamespace) -> Any:
    if a.x13_scale is None and not a.block_size and len(a.hidden_states):
        largest = 127.0 if a.w13.dtype is torch.int8 else 448.0
        a.x13_scale = (a.hidden_states.abs().max() / largest).expand(len(a.w13))
    return right(a)


@planted("all arithmetic in bfloat16", "rms_norm", dtype=torch.bfloat16)
def _(right: Any, a: SimpleNamespace) -> Any:
    s = a.x if a.residual is None else a.x + a.residual
    y = s * torch.rsqrt((s * s).mean(-1, keepdim=True) + a.epsilon)
    y = (y if a.weight is None else y * a.weight).contiguous()
    return y if a.residual is None else (y, s.contiguous())


@planted("all arithmetic in bfloat16", "silu_and_mul", dtype=torch.bfloat16)
def _(right: Any, a: SimpleNamespace) -> Any:
    gate, up = a.x.chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up).contiguous()


@planted("wrong in float16 only", "silu_and_mul", "rotary_embedding", dtype=torch.float16)
def _(right: Any, a: SimpleNamespace) -> Any:
    y = right(a)
    first = y if isinstance(y, Tensor) else y[0]
    if first.dtype is torch.float16:
        first.mul_(1.01)
    return y


# -- now and then -----------------------------------------------------------------------------------------------------


@planted("other bits at every call", "silu_and_mul", "paged_attention")
def _(right: Any, a: SimpleNamespace) -> Any:
    return right(a).mul_(1 + 1e-6 * torch.rand(()))


_chance = random.Random(0)


@planted("a race in 1 % of the calls", "silu_and_mul", "rms_norm", "linear", "paged_attention")
def _(right: Any, a: SimpleNamespace) -> Any:
    y = right(a)
    first = y if isinstance(y, Tensor) else y[0]
    if first.numel() and _chance.random() < 0.01:
        first.view(-1)[0] += 1
    return y


# -- prepared weights -------------------------------------------------------------------------------------------------


def with_form(parameter: str, make: Callable[[Tensor, Any], Any]) -> Mutation:
    """Multiply with a form of a weight, where there is one."""

    def mutation(right: Any, a: SimpleNamespace) -> Any:
        weight = a.__dict__.get(parameter)
        form = None if weight is None else weight_forms.of(weight, f"default.tried {parameter}", make)
        setattr(a, parameter, weight if form is None else form)
        return right(a)

    return mutation


def packed_backwards(weight: Tensor, before: Tensor | None) -> Tensor:
    whole = weight.detach().contiguous()
    return whole.view(torch.uint8).flip(0).view(weight.dtype)


def packed_once(weight: Tensor, before: Tensor | None) -> Tensor:
    return weight.detach().clone() if before is None else before


for operator in OPERATORS.values():
    for parameter in operator.weights:
        plant = planted(f"the form of '{parameter}' is in another order", operator.name, probes=False)
        plant(with_form(parameter, packed_backwards))
    for parameter in operator.weights[:1]:
        plant = planted(f"the form of '{parameter}' stays old", operator.name, probes=False)
        plant(with_form(parameter, packed_once))

"""The references are the ground truth, so they are held against float64 arithmetic that is written out here."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.testing import assert_close

from fl_dispatch import OpImpl, get_default_manager
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.evidence.arguments import has_nan
from fl_dispatch.evidence.verify import implementations
from fl_dispatch.ops import OPERATORS, Access, Mode, Sample, attention, lora
from fl_dispatch.ops.quantization import FP4, packs_two, rounded
from fl_dispatch.ops.results import flat
from fl_dispatch.run.direct import why_declined
from sampling import drawn
from tensors import alike

REFERENCE = ReferenceBackend()
COMPUTED = [name for name, op in OPERATORS.items() if not op.selection]
MOVING = ("index_key_write", "kv_cache_write", "moe_align_block_size")  # these compute nothing
INLINE = [name for name in COMPUTED if Mode.INLINE in OPERATORS[name].modes]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

each_operator = pytest.mark.parametrize("name", COMPUTED)
CASES = [(name, dtype) for name in COMPUTED for dtype in DTYPES]
each_case = pytest.mark.parametrize(
    ("name", "dtype"), drawn(CASES, len(CASES) // 2, "references"), ids=lambda value: str(value).removeprefix("torch.")
)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def samples(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Iterator[Sample]:
    return OPERATORS[name].samples(dtype, torch.device("cpu"), torch.Generator().manual_seed(seed))


def all_arguments(name: str, sample: Sample) -> tuple[Any, ...]:
    return OPERATORS[name].bind(sample.args, {})


def run(name: str, args: Any) -> list[Tensor]:
    """Outputs of the reference, which takes no hints, and the state that it wrote."""
    args = OPERATORS[name].bind(tuple(args), {})
    result = flat(getattr(REFERENCE, name)(*OPERATORS[name].operands(args)))
    states = [tensor for access, tensor in OPERATORS[name].written(args).values() if access is Access.STATE]
    return [*(tensor for tensor in result if tensor is not None), *states]


def double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and has_nan(value.dtype) else value


# ---- the arithmetic, written out


def exact_linear(x, weight, bias) -> list[Tensor]:
    products = (x[..., None, :] * weight).sum(-1)
    return [products if bias is None else products + bias]


def exact_lora_shrink(x, out, down, adapters, order, starts, active, scale, *others) -> list[Tensor]:
    """Token by token."""
    result = out.clone()
    for part, factor in enumerate(one for one in (down, *others) if one is not None):
        for token, adapter in enumerate(adapters.tolist()):
            if adapter >= 0:
                result[part, token] = scale * (factor[adapter] * x[token]).sum(-1)
    return [result]


def exact_lora_expand(y, products, up, adapters, order, starts, active, offset, *others) -> list[Tensor]:
    """Likewise."""
    result = y.clone()
    for part, factor in enumerate(one for one in (up, *others) if one is not None):
        for token, adapter in enumerate(adapters.tolist()):
            if adapter >= 0:
                columns = slice(offset, offset + factor.shape[1])
                result[token, columns] += (factor[adapter] * products[part, token]).sum(-1)
        offset += factor.shape[1]
    return [result]


def numbers_of(dtype) -> Tensor:
    """All numbers that a quantized type has."""
    bits = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).double()
    return bits[bits.isfinite() & (bits > -128 if dtype == "int8" else True)].sort().values


def nearest(x, numbers) -> Tensor:
    """The nearest of the numbers; the outermost ones for those beyond, and NaN for NaN."""
    within = x.clamp(numbers[0], numbers[-1])
    return numbers[(within[..., None] - numbers).abs().argmin(-1)].masked_fill(x.isnan(), math.nan)


def exact_quantize(x, dtype, group_size, scale) -> list[Tensor]:
    """Group by group."""
    numbers = numbers_of(dtype)
    largest, width = numbers[-1], group_size if group_size > 0 else x.shape[-1]
    result, scales = torch.empty_like(x), []
    for part, into in zip(x.split(width, -1), result.split(width, -1), strict=True):
        highest = part.abs().flatten(0 if group_size < 0 else -1).amax(-1, keepdim=True) if x.numel() else part[..., :1]
        unit = (highest / largest).clamp(min=1e-10) if scale is None else scale
        scales.append(unit.expand(*x.shape[:-1], 1))
        into.copy_(nearest(part / unit, numbers))
    if dtype == "int8":  # which has no NaN
        result.nan_to_num_(0)
    return [result, torch.cat(scales, -1)]


def exact_scaled_linear(x, x_scale, weight, weight_scale, bias, _, block) -> list[Tensor]:
    """Every element times the scale of its block; without blocks a row is one, and a scale may be for all columns."""
    down, across = (torch.arange(size) // (block or 1) for size in weight.shape)
    if not block:
        across = torch.zeros_like(across)
        down = down if weight_scale.shape[0] > 1 else torch.zeros_like(down)
    left, right = x * x_scale[..., across], weight * weight_scale[down][:, across]
    return exact_linear(left, right, bias)


def exact_weight_only_linear(x, weight, scale, zero, bias) -> list[Tensor]:
    inner = x.shape[-1]
    numbers = torch.empty(weight.shape[0], inner).double()
    if packs_two(weight):
        stored = weight.view(torch.uint8)
        numbers[:, 0::2], numbers[:, 1::2] = stored % 16, stored // 16
    else:
        numbers.copy_(weight)
    if weight.dtype is FP4:  # a sign, two bits of exponent, one of mantissa
        sign, exponent, mantissa = 1 - 2 * (numbers // 8), numbers % 8 // 2, numbers % 2
        numbers = sign * torch.where(exponent > 0, (2 + mantissa) * 2 ** (exponent - 2), mantissa / 2)
    group = torch.arange(inner) // (inner // scale.shape[1])
    middle = 8 * (weight.dtype is torch.uint8) if zero is None else zero[:, group].double()
    return exact_linear(x, (numbers - middle) * scale[:, group], bias)


def exact_silu_and_mul(x) -> list[Tensor]:
    width = x.shape[-1] // 2
    return [x[..., :width] / (1 + torch.exp(-x[..., :width])) * x[..., width:]]


def exact_gelu_and_mul(x, approximate) -> list[Tensor]:
    gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    if approximate == "none":
        return [gate * 0.5 * torch.erfc(-gate / math.sqrt(2)) * up]
    return [gate * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)) * up]


def exact_gelu(x, approximate) -> list[Tensor]:
    if approximate == "none":
        return [x * 0.5 * torch.erfc(-x / math.sqrt(2))]
    return [x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))]


def exact_quick_gelu(x) -> list[Tensor]:
    return [x / (1 + torch.exp(-1.702 * x))]


def exact_relu2(x) -> list[Tensor]:
    return [torch.where(x > 0, x * x, 0.0)]


def exact_xielu(x, alpha_p, alpha_n, beta, epsilon) -> list[Tensor]:
    positive, negative = torch.log1p(torch.exp(alpha_p)), beta + torch.log1p(torch.exp(alpha_n))
    below = (torch.exp(torch.minimum(x, x.new_tensor(epsilon))) - 1 - x) * negative
    return [beta * x + torch.where(x > 0, positive * x * x, below)]


def exact_mul_and_silu(x) -> list[Tensor]:
    return exact_silu_and_mul(torch.cat(x.chunk(2, -1)[::-1], -1))


def exact_fatrelu_and_mul(x, threshold) -> list[Tensor]:
    gate, up = x.chunk(2, -1)
    return [gate * up * (gate > threshold)]


def exact_silu_and_mul_with_clamp(x, limit, alpha, beta) -> list[Tensor]:
    gate, up = x.chunk(2, -1)
    gate, up = torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, limit * up.sign(), up)
    return [gate / (1 + torch.exp(-alpha * gate)) * (up + beta)]


def exact_swigluoai_and_mul(x, alpha, limit) -> list[Tensor]:
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    return exact_silu_and_mul_with_clamp(halves, limit, alpha, 1.0)


def exact_swiglustep_and_mul(x, limit) -> list[Tensor]:
    gate, up = x.chunk(2, -1)
    silu = gate / (1 + torch.exp(-gate))
    return [torch.where(silu > limit, limit, silu) * torch.where(up.abs() > limit, limit * up.sign(), up)]


def exact_situ_and_mul(x, beta, linear_beta) -> list[Tensor]:
    gate, up = x.chunk(2, -1)
    up = up if linear_beta is None else linear_beta * (2 * torch.sigmoid(2 * up / linear_beta) - 1)
    return [beta * (2 * torch.sigmoid(2 * gate / beta) - 1) / (1 + torch.exp(-gate)) * up]


def exact_gelu_and_mul_sparse(x, std_multiplier, approximate) -> list[Tensor]:
    gate, up = x.chunk(2, -1)
    mean = gate.sum(-1, keepdim=True) / gate.shape[-1]
    deviation = ((gate - mean) ** 2).sum(-1, keepdim=True).div(gate.shape[-1]).sqrt()
    above = gate - mean - std_multiplier * deviation
    return exact_gelu_and_mul(torch.cat((above * (above > 0), up), -1), approximate)


def exact_layer_norm(x, weight, bias, epsilon) -> list[Tensor]:
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    scaled = centred / (centred.norm(dim=-1, keepdim=True) ** 2 / x.shape[-1] + epsilon).sqrt()
    return [scaled * (1.0 if weight is None else weight) + (0.0 if bias is None else bias)]


def exact_rms_norm(x, residual, weight, epsilon, offset=0.0) -> list[Tensor]:
    total = x if residual is None else x + residual
    scale = 1.0 if weight is None else offset + weight
    y = total / (total.norm(dim=-1, keepdim=True) ** 2 / total.shape[-1] + epsilon).sqrt() * scale
    return [y] if residual is None else [y, total]


def exact_rms_norm_quantize(x, dtype, residual, weight, epsilon, group_size, scale) -> list[Tensor]:
    y, *total = exact_rms_norm(x, residual, weight, epsilon)
    return [*total, *exact_quantize(y, dtype, group_size, scale)]


def exact_silu_and_mul_quantize(x, dtype, group_size, scale) -> list[Tensor]:
    (y,) = exact_silu_and_mul(x)
    return exact_quantize(y, dtype, group_size, scale)


def exact_fused_linear(x, weight, scale, zero, bias, norm, residual, epsilon, gated) -> list[Tensor]:
    total = x if residual is None else x + residual
    rows = total if norm is None else exact_rms_norm(total, None, norm, epsilon)[0]
    if scale is None:
        (y,) = exact_linear(rows, weight, bias)
    else:
        (y,) = exact_weight_only_linear(rows, weight, scale.expand(len(weight), -1), zero, bias)
    return [*(exact_silu_and_mul(y) if gated else [y]), x.new_empty(0) if residual is None else total]


def exact_gemma_rms_norm(x, residual, weight, epsilon) -> list[Tensor]:
    return exact_rms_norm(x, residual, weight, epsilon, offset=1.0)


def exact_rms_norm_gated(x, gate, weight, epsilon, activation, group_size, norm_first) -> list[Tensor]:
    """One group of elements at a time."""
    factor = 1 / (1 + torch.exp(-gate)) * (gate if activation == "silu" else 1)
    inner = x if norm_first else x * factor
    parts = [exact_rms_norm(part, None, None, epsilon)[0] for part in inner.split(group_size or x.shape[-1], -1)]
    y = torch.cat(parts, -1) * (1.0 if weight is None else weight)
    return [y * factor if norm_first else y]


def exact_rotary_embedding(query, key, cos, sin, position_ids, interleaved, inplace) -> list[Tensor]:
    """A rotation of a pair is a product of complex numbers."""
    turn = torch.complex(cos, sin)[position_ids.long()][:, None, :]
    size = 2 * turn.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        part = x[..., :size]
        a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., : size // 2], part[..., size // 2 :])
        turned = torch.complex(a.contiguous(), b.contiguous()) * turn
        if interleaved:
            return torch.cat((torch.view_as_real(turned).flatten(-2), x[..., size:]), dim=-1)
        return torch.cat((turned.real, turned.imag, x[..., size:]), dim=-1)

    return [rotate(x) for x in (query, key) if x is not None]


def exact_kv_cache_write(
    key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale, *token_scales
) -> list[Tensor]:
    numbers, block_size = numbers_of("float8_e4m3fn"), key_cache.shape[1]
    caches, units = [key_cache.clone(), value_cache.clone()], [scale for scale in token_scales if scale is not None]
    units = [unit.clone() for unit in units]
    for token, slot in enumerate(slot_mapping.tolist()):
        place = (slot // block_size, slot % block_size)
        for index, (new, scale) in enumerate(((key[token], key_scale), (value[token], value_scale))):
            if slot >= 0 and units:
                units[index][place] = (new.abs().amax(-1) / 127).float()
                caches[index][place] = (
                    (new / (new.abs().amax(-1, keepdim=True) / 127)).round().nan_to_num(0).to(torch.int8)
                )
            elif slot >= 0:
                caches[index][place] = new if scale is None else nearest(new / scale, numbers)
    return [*caches, *units]


def exact_rotary_embedding_kv_cache_write(
    query, key, value, cos, sin, position_ids, key_cache, value_cache, slot_mapping, interleaved, *scales
) -> list[Tensor]:
    turned = exact_rotary_embedding(query, key, cos, sin, position_ids, interleaved, False)
    return [*turned, *exact_kv_cache_write(turned[1], value, key_cache, value_cache, slot_mapping, *scales)]


def exact_paged_attention(
    query,
    key_cache,
    value_cache,
    table,
    starts,
    lengths,
    _,
    __,
    scale,
    out,
    causal,
    window,
    softcap,
    slopes,
    sinks,
    key_scale,
    value_scale,
    key_scales,
    value_scales,
) -> list[Tensor]:
    """One query at a time, over the keys that it sees."""
    if key_scales is not None:
        key_scale, value_scale = key_scales[..., None], value_scales[..., None]
    if key_scale is not None:
        key_cache, value_cache = key_cache * key_scale, value_cache * value_scale
    result = query.new_zeros(*query.shape[:2], value_cache.shape[-1]) if out is None else out.clone()
    block, group = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
    for request, length in enumerate(lengths.tolist()):
        begin, end = starts[request : request + 2].tolist()
        for row in range(begin, end):
            place = length - (end - row)
            reach = length if window is None else window
            seen = torch.arange(max(0, place - reach + 1), place + 1 if causal else min(length, place + reach))
            slots = (table[request, seen // block].long(), seen % block)
            keys, values = (cache[slots].repeat_interleave(group, dim=1) for cache in (key_cache, value_cache))
            scores = (query[row] * keys).sum(-1) * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores if slopes is None else scores - slopes * (place - seen).abs()[:, None]
            highest = scores.amax(0)
            weights = torch.exp(scores - highest)
            below = weights.sum(0) + (0 if sinks is None else torch.exp(sinks - highest))
            result[row] = ((weights / below)[..., None] * values).sum(0)
    return [result]


def exact_mla_decode(
    query, cache, table, starts, lengths, _, __, scale, rank, out, causal, unit, rotary
) -> list[Tensor]:
    """One query at a time, over the latent rows that it sees."""
    query = query if rotary is None else torch.cat((query, rotary), dim=-1)
    cache = cache if unit is None else cache * unit
    result = query.new_zeros(*query.shape[:2], rank) if out is None else out.clone()
    for request, length in enumerate(lengths.tolist()):
        begin, end = starts[request : request + 2].tolist()
        for row in range(begin, end):
            seen = torch.arange(length - (end - row) + 1 if causal else length)
            latent = cache[table[request, seen // cache.shape[1]].long(), seen % cache.shape[1]]
            scores = torch.exp((query[row] @ latent.T * scale).double())
            result[row] = (scores / scores.sum(-1, keepdim=True)) @ latent[:, :rank]
    return [result]


def exact_mla_prefill(query, key, value, starts, key_starts, _, __, scale, out, causal) -> list[Tensor]:
    """One query at a time, over the keys that it sees."""
    result = query.new_zeros(*query.shape[:2], value.shape[-1]) if out is None else out.clone()
    lse = query.new_full((query.shape[1], query.shape[0]), -math.inf)
    for begin, end, first, last in zip(starts[:-1], starts[1:], key_starts[:-1], key_starts[1:], strict=True):
        for row in range(begin, end):
            count = max(0, int(last - first - (end - row) + 1)) if causal else int(last - first)
            scores = torch.exp((key[first : first + count] * query[row]).sum(-1) * scale)
            if count:
                result[row] = (scores[..., None] * value[first : first + count]).sum(0) / scores.sum(0)[:, None]
                lse[:, row] = scores.sum(0).log()
    return [result, lse]


def exact_index_key_write(key, cache, slots, scales) -> list[Tensor]:
    """One token and one group at a time."""
    cache = cache.clone()
    scales = None if scales is None else scales.clone()
    size = cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        for group in range(-(-key.shape[1] // 128)) if slot >= 0 else ():
            part, place = slice(128 * group, 128 * group + 128), (slot // size, slot % size)
            if scales is None:
                cache[*place, part] = key[token, part]
                continue
            numbers, scales[*place, group] = exact_in_fp8(key[token, part])
            cache[*place, part] = numbers.to(cache.dtype)
    return [cache] if scales is None else [cache, scales]


def exact_in_fp8(group: Tensor) -> tuple[Tensor, float]:
    """One group's numbers in fp8 and their scale, whose exponent is found by counting up."""
    largest, scale = max(1e-4, float(group.abs().max())), 2.0**-40
    while 448 * scale < largest:
        scale *= 2
    return (group / scale).to(torch.float8_e4m3fn), scale


def exact_index_topk(query, weights, cache, table, starts, lengths, _, __, topk, out, scales) -> list[Tensor]:
    """One query at a time: a token is listed if fewer than ``topk`` come before it."""
    result = query.new_full((len(query), topk), -1).int() if out is None else out.clone()
    size, groups = cache.shape[1], torch.arange(cache.shape[2]) // 128
    if scales is not None:
        query = query.clone()
        for group in (group for head in query.flatten(0, 1) for group in head.split(128)):
            numbers, unit = exact_in_fp8(group)
            group.copy_(numbers.double() * unit)
    for request, length in enumerate(lengths.tolist()):
        begin, end = starts[request : request + 2].tolist()
        slots = [(int(table[request, place // size]), place % size) for place in range(length)]
        keys = [cache[slot] * (1 if scales is None else scales[slot][groups]) for slot in slots]
        for row in range(begin, end):
            products = torch.stack(keys[: length - end + row + 1]) @ query[row].T
            scores = (products.clamp(min=0) * weights[row]).sum(-1)
            place = torch.arange(len(scores))
            better = scores[None] > scores[:, None]
            before = better | ((scores[None] == scores[:, None]) & (place[None] < place[:, None]))
            listed = place[before.sum(-1) < topk]
            result[row] = -1
            result[row, : len(listed)] = listed.int()
    return [result]


def exact_mla_sparse(query, cache, lists, table, starts, _, scale, rank, out, cache_scale, rope) -> list[Tensor]:
    """One query and one head at a time."""
    query = query if rope is None else torch.cat((query, rope), -1)
    result = query.new_zeros(*query.shape[:2], rank) if out is None else out.clone()
    size = cache.shape[1]
    for request, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        for row in range(begin, end):
            listed = [place for place in lists[row].tolist() if place >= 0]
            result[row] = 0
            if listed:
                rows = torch.stack([cache[table[request, place // size], place % size] for place in listed])
                rows = rows * (1 if cache_scale is None else cache_scale)
                for head in range(query.shape[1]):
                    weights = torch.exp(rows @ query[row, head] * scale)
                    result[row, head] = weights @ rows[:, :rank] / weights.sum()
    return [result]


def exact_causal_conv1d(x, weight, bias, states, slots, starts, has_state, activation) -> list[Tensor]:
    """One token at a time, over all inputs of its sequence."""
    states, result, width = states.clone(), torch.zeros_like(x), weight.shape[1]
    for request, slot in enumerate(slots.tolist()):
        begin, end = starts[request : request + 2].tolist()
        old = has_state is None or bool(has_state[request])
        inputs = [*(states[slot].t() if old else torch.zeros_like(states[slot].t())), *x[begin:end]]
        for row in range(begin, end):
            seen = torch.stack(inputs[row - begin : row - begin + width], dim=1)
            y = (seen * weight).sum(1) + (0.0 if bias is None else bias)
            result[row] = y / (1 + torch.exp(-y)) if activation == "silu" else y
        if end > begin:
            states[slot] = torch.stack(inputs[len(inputs) - width + 1 :], dim=1)
    return [result, states]


def exact_causal_conv1d_update(x, weight, bias, states, slots, activation) -> list[Tensor]:
    return exact_causal_conv1d(x, weight, bias, states, slots, torch.arange(len(x) + 1), None, activation)


def exact_gated_delta_rule(
    query, key, value, a, b, a_log, dt_bias, states, slots, starts, has_state, scale
) -> list[Tensor]:
    """One token at a time, by the recurrence itself."""
    states, result = states.clone(), torch.zeros_like(value)
    group = value.shape[1] // key.shape[1]
    query, key = (
        (x / (x * x).sum(-1, keepdim=True).add(1e-6).sqrt()).repeat_interleave(group, 1) for x in (query, key)
    )
    decay = torch.exp(-torch.exp(a_log) * torch.log1p(torch.exp(a + dt_bias)))
    for request, slot in enumerate(slots.tolist()):
        begin, end = starts[request : request + 2].tolist()
        old = has_state is None or bool(has_state[request])
        state = states[slot].clone() if old else torch.zeros_like(states[slot])
        for row in range(begin, end):
            state *= decay[row, :, None, None]
            wrong = value[row] - (key[row][:, :, None] * state).sum(1)
            state += key[row][:, :, None] * (wrong / (1 + torch.exp(-b[row]))[:, None])[:, None]
            result[row] = scale * (query[row][:, :, None] * state).sum(1)
        if end > begin:
            states[slot] = state
    return [result, states]


def exact_gated_delta_rule_update(query, key, value, a, b, a_log, dt_bias, states, slots, scale) -> list[Tensor]:
    rows = torch.arange(len(value) + 1)
    return exact_gated_delta_rule(query, key, value, a, b, a_log, dt_bias, states, slots, rows, None, scale)


def exact_selective_scan(x, dt, a, b, c, d, dt_bias, states, slots, starts, has_state) -> list[Tensor]:
    """One token at a time, by the recurrence itself."""
    states, result, heads = states.clone(), torch.zeros_like(x), x.shape[1]
    step = torch.log1p(torch.exp(dt if dt_bias is None else dt + dt_bias))
    group = torch.arange(heads) // (heads // b.shape[1])
    for request, slot in enumerate(slots.tolist()):
        begin, end = starts[request : request + 2].tolist()
        old = has_state is None or bool(has_state[request])
        state = states[slot].clone() if old else torch.zeros_like(states[slot])
        for row in range(begin, end):
            by_column = a if a.dim() == 2 else a[:, None]
            state *= torch.exp(step[row][:, None] * by_column)[:, None, :]
            state += (step[row][:, None] * x[row])[:, :, None] * b[row, group][:, None]
            result[row] = (state * c[row, group][:, None]).sum(2) + (0.0 if d is None else d[:, None] * x[row])
        if end > begin:
            states[slot] = state
    return [result, states]


def exact_selective_state_update(x, dt, a, b, c, d, dt_bias, states, slots) -> list[Tensor]:
    rows = torch.arange(len(x) + 1)
    return exact_selective_scan(x, dt, a, b, c, d, dt_bias, states, slots, rows, None)


def exact_topk_softmax(logits, topk, renormalize, bias) -> list[Tensor]:
    return exact_grouped_topk(logits, topk, 1, 1, renormalize, "softmax", 1.0, bias)


def exact_topk_sigmoid(logits, topk, renormalize, bias) -> list[Tensor]:
    return exact_grouped_topk(logits, topk, 1, 1, renormalize, "sigmoid", 1.0, bias)


def exact_grouped_topk(logits, topk, groups, topk_group, renormalize, scoring, factor, bias) -> list[Tensor]:
    """Token by token, with sorted lists."""
    weights, ids = torch.zeros(len(logits), topk).double(), torch.zeros(len(logits), topk, dtype=torch.int32)
    size = logits.shape[1] // groups
    for row, line in enumerate(logits.tolist()):
        terms = [math.exp(x - max(line)) for x in line]
        score = [x / sum(terms) for x in terms] if scoring == "softmax" else [1 / (1 + math.exp(-x)) for x in line]
        value = [x if bias is None else x + bias[expert].item() for expert, x in enumerate(score)]
        ranked = [sorted(value[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
        rank = [values[0] if bias is None else sum(values[:2]) for values in ranked]
        allowed = sorted(range(groups), key=lambda g: -rank[g])[:topk_group]
        best = sorted((e for e in range(len(line)) if e // size in allowed), key=lambda e: -value[e])[:topk]
        total = sum(score[expert] for expert in best) if renormalize else 1.0
        ids[row] = torch.tensor(best)
        weights[row] = torch.tensor([score[expert] / total * factor for expert in best])
    return [weights, ids]


def exact_moe_align_block_size(ids, block_size, experts, expert_map) -> list[Tensor]:
    """Expert by expert, with lists."""
    pairs: dict[int, list[int]] = {expert: [] for expert in range(experts)}
    for pair, expert in enumerate(ids.flatten().tolist()):
        local = expert if expert < 0 or expert_map is None else int(expert_map[expert])
        if local >= 0:
            pairs[local].append(pair)
    places: list[int] = []
    blocks: list[int] = []
    for expert, found in pairs.items():
        count = math.ceil(len(found) / block_size)
        places += found + [ids.numel()] * (count * block_size - len(found))
        blocks += [expert] * count
    used, most = len(places), (ids.numel() + min(ids.numel(), experts) * (block_size - 1)) // block_size
    places += [ids.numel()] * (most * block_size - used)
    blocks += [-1] * (most - len(blocks))
    return [torch.tensor(numbers, dtype=torch.int32) for numbers in (places, blocks, [used])]


def exact_moe_sum(x, out) -> list[Tensor]:
    return [torch.einsum("tkh->th", x)]


EXACT_ACTIVATIONS = {
    "silu": exact_silu_and_mul,
    "swigluoai": lambda h: exact_swigluoai_and_mul(h, 1.702, 7.0),
    "gelu": lambda h: exact_gelu_and_mul(h, "none"),
    "gelu_tanh": lambda h: exact_gelu_and_mul(h, "tanh"),
    "silu_no_mul": lambda h: [h / (1 + torch.exp(-h))],
    "gelu_no_mul": lambda h: exact_gelu(h, "none"),
    "gelu_tanh_no_mul": lambda h: exact_gelu(h, "tanh"),
    "relu2_no_mul": exact_relu2,
}


def exact_mixture(x, weights, ids, activation, on_input, expert_map, first, second) -> list[Tensor]:
    """One token and expert at a time; ``first`` and ``second``: expert and row → product."""
    total = torch.zeros_like(x)
    for token, choice in itertools.product(*map(range, ids.shape)):
        expert = int(ids[token, choice])
        expert = expert if expert_map is None or expert < 0 else int(expert_map[expert])
        if expert >= 0:
            weight = weights[token, choice]
            (active,) = EXACT_ACTIVATIONS[activation](first(expert, x[token] * weight if on_input else x[token]))
            outer = second(expert, active)
            total[token] += outer if on_input else outer * weight
    return [total]


def exact_fused_moe(x, w13, w2, weights, ids, activation, on_input, expert_map, b13, b2, out) -> list[Tensor]:
    def product(weight, bias) -> Any:
        return lambda expert, row: weight[expert] @ row + (0 if bias is None else bias[expert])

    return exact_mixture(x, weights, ids, activation, on_input, expert_map, product(w13, b13), product(w2, b2))


def exact_scaled_moe(
    x, w13, s13, w2, s2, weights, ids, activation, on_input, expert_map, b13, b2, x13, x2, block, out
) -> list[Tensor]:
    kind = "int8" if w13.dtype is torch.int8 else "float8_e4m3fn"

    def product(weight, scale, bias, given) -> Any:
        def of(expert: int, row: Tensor) -> Tensor:
            how = (block, None) if given is None else (-1, given[expert])
            rows = exact_quantize(row[None], kind, *how)
            added = None if bias is None else bias[expert]
            return exact_scaled_linear(*rows, weight[expert], scale[expert], added, None, block)[0][0]

        return of

    products = product(w13, s13, b13, x13), product(w2, s2, b2, x2)
    return exact_mixture(x, weights, ids, activation, on_input, expert_map, *products)


def exact_weight_only_moe(
    x, w13, s13, w2, s2, weights, ids, activation, on_input, expert_map, b13, b2, z13, z2, out, f13, f2, rounding
) -> list[Tensor]:
    def product(weight, scale, bias, zero, factor) -> Any:
        def of(expert: int, row: Tensor) -> Tensor:
            zeros, added = (None if one is None else one[expert] for one in (zero, bias))
            if rounding:  # the format's own library says of it what is right: test_rounded_rows.py
                row = rounded(row[None], rounding, None if factor is None else factor[expert : expert + 1])[0]
            return exact_weight_only_linear(row[None], weight[expert], scale[expert], zeros, added)[0][0]

        return of

    products = product(w13, s13, b13, z13, f13), product(w2, s2, b2, z2, f2)
    return exact_mixture(x, weights, ids, activation, on_input, expert_map, *products)


# ---- right


def result_dtype(name: str, index: int, dtype: torch.dtype, args: tuple[Any, ...]) -> torch.dtype:
    """The dtype of an operator's result: that of the input, unless the declaration says otherwise."""
    wide = torch.promote_types(dtype, torch.float32)
    if index and "states" in OPERATORS[name].parameters:
        return args[list(OPERATORS[name].parameters).index("states")].dtype
    if name.endswith("quantize"):
        sums = (dtype,) if name == "rms_norm_quantize" and args[2] is not None else ()
        return (*sums, getattr(torch, args[1]), wide)[index]
    if name == "kv_cache_write":
        return args[2].dtype if index < 2 else torch.float32
    if name == "index_key_write":
        return (args[1].dtype, torch.float32)[index]
    if name == "index_topk":
        return torch.int32
    if name == "rotary_embedding_kv_cache_write":
        return dtype if index < 2 else args[6].dtype
    if OPERATORS[name].reference.__module__.endswith(".routing"):
        return (torch.float32, torch.int32)[index]
    widened = {("mla_prefill", 1): wide, ("lora_shrink", 0): wide}
    return torch.int32 if name == "moe_align_block_size" else widened.get((name, index), dtype)


@each_case
def test_a_reference_is_right_on_every_sample(name: str, dtype: torch.dtype) -> None:
    tolerance = OPERATORS[name].tolerances[dtype]
    for sample in samples(name, dtype):
        args = all_arguments(name, sample)
        expected = globals()[f"exact_{name}"](*map(double, OPERATORS[name].operands(args)))
        for index, (actual, wanted) in enumerate(zip(run(name, args), expected, strict=True)):
            assert actual.dtype is result_dtype(name, index, dtype, args)
            if not wanted.is_floating_point():
                assert torch.equal(actual, wanted), sample.label
                continue
            torch.testing.assert_close(
                actual.double(), wanted, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True,
                msg=lambda m: f"{sample.label}: {m}",
            )  # fmt: skip


@each_dtype
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 300.0])
@pytest.mark.parametrize("name", ["rms_norm", "gemma_rms_norm"])
def test_norms_are_finite_and_right_at_any_scale(name: str, scale: float, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(2, 3, 96) * scale).to(dtype)
    weight = torch.randn(96).to(dtype)
    tolerance = OPERATORS[name].tolerances[dtype]
    actual = run(name, (x, residual, weight, 1e-6))
    expected = globals()[f"exact_{name}"](x.double(), residual.double(), weight.double(), 1e-6)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.isfinite().all()
        assert ((got - wanted).abs() <= tolerance.atol + tolerance.rtol * wanted.abs()).all()


def test_a_gate_of_any_size_gives_a_finite_activation() -> None:
    x = torch.tensor([[-6e4, -300.0, -1e-4, 0.0, 1e-4, 300.0, 6e4] + [1.0] * 7], dtype=torch.float16)
    for result in (*run("silu_and_mul", (x,)), *run("gelu_and_mul", (x, "none")), *run("gelu_and_mul", (x, "tanh"))):
        assert torch.equal(result[0, [0, 1, 3, 5, 6]], x.new_tensor([0.0, 0.0, 0.0, 300.0, 6e4]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_sum_is_normalized_before_it_is_rounded(dtype: torch.dtype) -> None:
    """As vLLM's native operator does it."""
    x, residual = (torch.randn(64, 64).to(dtype) for _ in range(2))
    wide = x.float() + residual.float()
    normalized, total = run("rms_norm", (x, residual, None, 1e-6))
    assert torch.equal(total, wide.to(dtype))
    assert torch.equal(normalized, run("rms_norm", (wide, None, None, 1e-6))[0].to(dtype))
    assert not torch.equal(normalized, run("rms_norm", (total, None, None, 1e-6))[0])


def test_a_half_weight_does_not_round_a_float32_input() -> None:
    x, weight = torch.randn(3, 64), torch.ones(64, dtype=torch.bfloat16)
    assert torch.equal(*run("rms_norm", (x, None, weight, 1e-6)), *run("rms_norm", (x, None, None, 1e-6)))


def test_rotation_keeps_the_length_of_a_head() -> None:
    query, key, cos, sin, positions, *_ = next(samples("rotary_embedding", torch.float64)).args
    before = query.norm(dim=-1)
    rotated, _ = REFERENCE.rotary_embedding(query, key, cos, sin, positions)
    torch.testing.assert_close(rotated.norm(dim=-1), before)


def test_attention_does_not_read_blocks_that_the_window_has_left() -> None:
    args = list(next(s for s in samples("paged_attention") if s.label == "sliding window 32").args)
    expected = run("paged_attention", args)
    key_cache, value_cache, table, lengths = args[1].clone(), args[2].clone(), args[3], args[5]
    key_cache[table[0, 0]] = value_cache[table[0, 0]] = math.nan
    assert lengths[0] > 48
    args[1:3] = key_cache, value_cache
    assert torch.equal(*run("paged_attention", args), *expected)


def test_queries_taken_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    args = next(s for s in samples("paged_attention", torch.float64) if s.label.startswith("mixed")).args
    whole = run("paged_attention", args)
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 5000)
    torch.testing.assert_close(run("paged_attention", args), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_attention_agrees_with_scaled_dot_product_attention(kv_heads: int, window: int | None, causal: bool) -> None:
    query, keys, values = torch.randn(11, 8, 64), torch.randn(32, kv_heads, 64), torch.randn(32, kv_heads, 64)
    length, place = 29, torch.arange(18, 29)[:, None]
    seen = torch.arange(length)
    mask = (seen <= place) if causal else torch.ones(11, length, dtype=torch.bool)
    mask &= (place - seen).abs() < (window or length)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys[:length].transpose(0, 1), values[:length].transpose(0, 1), mask, enable_gqa=True
    ).transpose(0, 1)
    table, starts = torch.tensor([[3, 0, 2, 1]], dtype=torch.int32), torch.tensor([0, 11], dtype=torch.int32)
    pages = [x.view(4, 8, kv_heads, 64)[[1, 3, 2, 0]] for x in (keys, values)]
    lengths = torch.tensor([length], dtype=torch.int32)
    actual = REFERENCE.paged_attention(query, *pages, table, starts, lengths, 11, 29, 64**-0.5, None, causal, window)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)


# ---- as declared


@each_operator
def test_a_declarations_function_is_the_reference_by_every_path(name: str) -> None:
    family = OPERATORS[name].reference.__module__.rpartition(".")[2]
    documented = importlib.import_module(f"fl_dispatch.backends.reference.impl.{family}")
    assert getattr(REFERENCE, name) is getattr(documented, name) is OPERATORS[name].reference


@each_case
def test_arguments_that_are_not_declared_as_written_are_unchanged(name: str, dtype: torch.dtype) -> None:
    for sample, before in zip(samples(name, dtype), samples(name, dtype), strict=True):
        args = all_arguments(name, sample)
        written = OPERATORS[name].written(args)
        run(name, args)
        for parameter, arg, old in zip(OPERATORS[name].parameters, args, all_arguments(name, before), strict=True):
            if isinstance(arg, Tensor) and parameter not in written:
                assert alike(arg, old), f"{sample.label}: {parameter}"


def test_a_view_that_is_rotated_in_place_leaves_its_neighbours_alone() -> None:
    for sample, before in zip(samples("rotary_embedding"), samples("rotary_embedding"), strict=True):
        query, key, *_ = sample.args
        run("rotary_embedding", sample.args)
        if query._base is not None and key is not None:
            rest = query._base[:, query.shape[1] + key.shape[1] :]
            assert torch.equal(rest, before.args[0]._base[:, query.shape[1] + key.shape[1] :])


def test_a_slot_that_is_not_finite_reaches_no_token_of_another_adapter() -> None:
    for name, factor in (("lora_shrink", 2), ("lora_expand", 2)):
        args = list(next(s for s in samples(name) if s.label.startswith("decode")).args)
        expected = run(name, [arg.clone() if isinstance(arg, Tensor) else arg for arg in args])
        args[factor] = args[factor].clone()
        args[factor][2] = math.nan  # nobody has it
        assert torch.equal(*run(name, args), *expected)


def test_what_is_written_is_what_was_given() -> None:
    for sample in samples("rotary_embedding"):
        query, key, *_, inplace = sample.args
        rotated = REFERENCE.rotary_embedding(*sample.args)
        assert ((rotated[0] is query) and (rotated[1] is key)) == inplace or key is None
    for name, position in (("paged_attention", 9), ("mla_decode", 9), ("mla_prefill", 8)):
        for sample in samples(name):
            out = sample.args[position]
            result = getattr(REFERENCE, name)(*sample.args)
            assert out is None or (result[0] if isinstance(result, tuple) else result) is out


@each_case
def test_a_fake_has_the_shape_dtype_and_strides_of_the_result(name: str, dtype: torch.dtype) -> None:
    def meta(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    for sample in samples(name, dtype):
        args = all_arguments(name, sample)
        fake = OPERATORS[name].fake(*map(meta, args))
        real = getattr(REFERENCE, name)(*OPERATORS[name].operands(args))
        pairs = [(fake, real)] if not isinstance(real, tuple) else list(zip(fake, real, strict=True))
        for imagined, actual in pairs:
            assert (imagined is None) == (actual is None)
            if actual is not None:
                expected = (actual.shape, actual.dtype, actual.stride())
                assert (imagined.shape, imagined.dtype, imagined.stride()) == expected, sample.label


@each_operator
def test_samples_depend_on_nothing_but_the_generator(name: str) -> None:
    for first, second in zip(samples(name, seed=7), samples(name, seed=7), strict=True):
        assert first.label == second.label
        for one, other in zip(first.args, second.args, strict=True):
            assert alike(one, other) if isinstance(one, Tensor) else one == other


@each_operator
def test_samples_have_distinct_labels_and_cover_serving_and_corners(name: str) -> None:
    found = list(samples(name))
    assert len({sample.label for sample in found}) == len(found)
    assert {sample.serving for sample in found} == {True, False}
    assert any("empty batch" in sample.label for sample in found)


@each_operator
def test_work_counts_bytes_and_operations_of_every_sample(name: str) -> None:
    for sample in samples(name):
        work = OPERATORS[name].work(*sample.args)
        empty = "empty" in sample.label
        assert work.operations == 0 if empty or name in MOVING else work.operations > 0
        assert empty or work.bytes_moved > 0


def test_work_of_causal_attention_is_that_of_the_visible_pairs() -> None:
    (one,) = (s for s in samples("paged_attention") if s.label == "sliding window 1")
    assert OPERATORS["paged_attention"].work(*one.args).operations == 2 * 3 * 4 * (64 + 64)


def test_attention_tells_prefill_from_decode() -> None:
    workload = OPERATORS["paged_attention"].workload
    phases = {s.label.split(",")[0]: workload(*s.args) for s in samples("paged_attention")}
    assert (phases["decode"].phase, phases["decode"].tokens) == ("decode", 8)
    assert (phases["prefill"].phase, phases["prefill"].tokens) == ("prefill", 168)


@pytest.mark.parametrize("name", INLINE)
def test_inline_references_are_traced_without_a_graph_break(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(getattr(REFERENCE, name), fullgraph=True, backend="eager", dynamic=False)
    labels = (
        "32 of",
        "32x2048",
        "32x4096",
        "decode, 32 tokens",
        "decode, 2 adapters",
        "not in place, half of the head, interleaved",
    )
    pairs = zip(samples(name), samples(name), strict=True)
    chosen = [(one, again) for one, again in pairs if one.label.startswith(labels)]
    assert chosen
    for sample, again in chosen:
        torch.testing.assert_close(compiled(*sample.args), getattr(REFERENCE, name)(*again.args), rtol=0, atol=0)


@each_operator
def test_a_reference_that_no_graph_can_hold_says_that_it_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without data it cannot go on. The number of adapters lies in host memory, so reading it waits for nothing."""
    monkeypatch.setattr(lora, "_idle", lambda active: False)
    operator, stopped = OPERATORS[name], False
    for sample in samples(name):
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in sample.args]
        try:
            with mode:
                operator.reference(*fakes)
        except (DataDependentOutputException, DynamicOutputShapeException):
            stopped = True
    assert stopped is operator.waits


def test_norms_in_a_row_read_the_sum_with_the_residual_once_when_compiled() -> None:
    """Inductor would compute the sum again in the second norm, whose kernel would then read four tensors, not three."""
    norm, dtype = OPERATORS["rms_norm"].reference, torch.bfloat16

    def two(x: Tensor, residual: Tensor, weight: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
        y, residual = norm(x, residual, weight)
        return norm(y @ product, residual, weight)

    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 64), (3, 64), (64,), (64, 64))
    given = [(torch.randn(shape, generator=generator) / 4).to(dtype) for shape in shapes]
    torch._dynamo.reset()
    found, sources = run_and_get_code(torch.compile(two, fullgraph=True), *given)
    source = "\n".join(sources)
    assert source.count("async_compile.cpp_pybinding(") == 1  # both norms are the same kernel
    for one, other in zip(found, two(*given), strict=True):
        assert_close(one, other, atol=0.05, rtol=0.02)


OURS = [impl for impl in implementations(get_default_manager()) if impl.impl_id.startswith("reference.")]


@pytest.mark.parametrize("impl", OURS, ids=lambda impl: f"{impl.op_name}-{impl.impl_id}")
def test_a_reference_makes_its_tensors_where_its_arguments_lie(impl: OpImpl) -> None:
    """A default device that holds no numbers stands for each that is not the arguments'."""
    state, compared = get_default_manager().state, 0
    for sample in itertools.islice(samples(impl.op_name), 20):
        if why_declined(state, impl, all_arguments(impl.op_name, sample)):
            continue
        given = copy.deepcopy(sample)
        try:
            with torch.device("meta"):
                found = flat(impl.fn(*given.args))
        except NotImplementedError:
            continue
        assert_close(found, flat(impl.fn(*sample.args)), rtol=0, atol=0, equal_nan=True)
        compared += 1
    assert compared

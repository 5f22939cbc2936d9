"""The calls of a GPU's start are enough: no batch that the scheduler allows needs a kernel that was not compiled then.

Triton compiles a kernel for each combination of constants, for integers that are 1 or divisible by 16, and for each
number of warps and stages. The tests compare these keys, which the launchers get on any machine: the tensors are on
PyTorch's meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from fl_dispatch.backends.triton.impl import hopper, launch
from fl_dispatch.backends.triton.impl.attention import latent_decode, latent_prefill, paged
from fl_dispatch.backends.triton.impl.experts import alignment, fused_moe, quantized_moe, routing
from fl_dispatch.backends.triton.impl.fusion import quantized_rows
from fl_dispatch.backends.triton.impl.products import linear, scaled_linear, weight_only_linear
from fl_dispatch.backends.triton.impl.rows import activation, normalization, quantization
from fl_dispatch.backends.triton.impl.states import convolution, delta_rule, state_space
from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.hosting.start import warm_batches
from vllm_fl.worker import warm_up

META = torch.device("meta")
Keys = set[tuple[Any, ...]]
PROCESSORS = 132
SHARED_MEMORY = 232_448
"""An H200's, the latter in bytes of a program."""
LIMITS = [(512, 64, 4), (4096, 8192, 256), (8192, 2048, 64), (131072, 16384, 1024)]
"""Longest sequence, most tokens and most requests of a batch."""


class Recorder:
    """In the place of a launcher: keeps what would be compiled."""

    def __init__(self, launcher: Launcher, keys: Keys) -> None:
        self.kernel, self.keys = launcher.kernel, keys

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Any],
        *,
        sizes: Sequence[int] = (),
        warps: int = 4,
        stages: int = 3,
    ) -> None:
        """Keep the key of a launch."""
        parameters = self.kernel.params[len(tensors) :]
        given = (*sizes, *numbers)
        values = [_specialized(parameter, value) for parameter, value in zip(parameters, given, strict=True)]
        self.keys.add((self.kernel.__name__, warps, stages, *(tensor.dtype for tensor in tensors), *values))


def _specialized(parameter: Any, value: Any) -> Any:
    """The part of a value that decides about the compiled code."""
    if parameter.is_constexpr:
        return value
    if parameter.do_not_specialize or not isinstance(value, int):
        return None
    return "one" if value == 1 else value % 16 == 0


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    """The keys of all launches since it was emptied."""
    found: Keys = set()
    products = (
        activation,
        normalization,
        quantized_rows,
        linear,
        quantization,
        quantized_moe,
        scaled_linear,
        weight_only_linear,
    )
    others = (alignment, paged, convolution, delta_rule, latent_decode, latent_prefill, fused_moe, routing, state_space)
    for module in (*products, *others):
        for name, launcher in vars(module).items():
            if isinstance(launcher, Launcher):
                monkeypatch.setattr(module, name, Recorder(launcher, found))
    for module in (linear, scaled_linear, weight_only_linear):
        monkeypatch.setattr(module, "processors", lambda device: PROCESSORS, raising=False)
    for module in (launch, linear, scaled_linear):
        monkeypatch.setattr(module, "shared_memory", lambda device: SHARED_MEMORY)
    slots = paged.SHORT_PER_PROCESSOR * PROCESSORS
    for module in (paged, latent_decode):
        monkeypatch.setattr(module, "_slots", lambda device: slots)
    return found


def config(limits: tuple[int, int, int]) -> Any:
    """The part of vLLM's configuration that the warm-up reads."""
    length, tokens, requests = limits
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=requests),
        model_config=SimpleNamespace(max_model_len=length),
    )


def integers(*shape: int) -> torch.Tensor:
    """Integers of some shape."""
    return torch.empty(shape, dtype=torch.int32, device=META)


def attend(shape: tuple[int, int, int], dtype: torch.dtype, queries: Sequence[int], longest: int, width: int) -> None:
    """Call ``paged_attention``; ``shape`` is heads, key-value heads and the head's size."""
    heads, kv_heads, dim = shape
    cache = torch.empty(64, 16, kv_heads, dim, dtype=dtype, device=META)
    query = torch.empty(sum(queries), heads, dim, dtype=dtype, device=META)
    table, starts, lengths = integers(len(queries), width), integers(len(queries) + 1), integers(len(queries))
    paged.paged_attention(query, cache, cache, table, starts, lengths, max(queries), longest, 0.1)


def latent(heads: int, dtype: torch.dtype, queries: Sequence[int], longest: int, width: int) -> None:
    """Call ``mla_decode`` for requests with one new token, else ``mla_prefill`` in its two forms."""
    starts = integers(len(queries) + 1)
    if max(queries) == 1:
        cache = torch.empty(64, 16, 576, dtype=dtype, device=META)
        query = torch.empty(len(queries), heads, 512, dtype=dtype, device=META)
        rope = torch.empty(len(queries), heads, 192, dtype=dtype, device=META)[..., 128:]
        table, lengths = integers(len(queries), width), integers(len(queries))
        latent_decode.mla_decode(query, cache, table, starts, lengths, 1, longest, 0.1, 512, query_rope=rope)
        return
    query = torch.empty(sum(queries), heads, 192, dtype=dtype, device=META)
    value = torch.empty(sum(queries), heads, 128, dtype=dtype, device=META)
    for causal in (True, False):
        latent_prefill.mla_prefill(query, query, value, starts, starts, max(queries), longest, 0.1, causal=causal)


def experts(shape: tuple[int, int], dtype: torch.dtype, tokens: int) -> None:
    """Call ``topk_softmax`` and ``fused_moe``; ``shape`` is experts and how many of them a token takes."""
    number, chosen = shape
    logits = torch.empty(tokens, number, dtype=dtype, device=META)
    weights, ids = routing.topk_softmax(logits, chosen, True)[:2]
    states = torch.empty(tokens, 256, dtype=dtype, device=META)
    w13 = torch.empty(number, 256, 256, dtype=dtype, device=META)
    w2 = torch.empty(number, 256, 128, dtype=dtype, device=META)
    fused_moe.fused_moe(states, w13, w2, weights, ids)


def product(weight: torch.Tensor, blocks: int, tokens: int) -> None:
    """Quantize rows, with the norm before and the gate behind and without, and call ``scaled_linear``."""
    columns, inner = weight.shape
    numbers = "int8" if weight.dtype is torch.int8 else "float8_e4m3fn"
    rows, half = (torch.empty(tokens, width, dtype=torch.bfloat16, device=META) for width in (inner, 2 * inner))
    quantized_rows.rms_norm_quantize(rows, numbers, None, rows.new_empty(inner), 1e-5, blocks)
    quantized_rows.silu_and_mul_quantize(half, numbers, blocks)
    x, x_scale = quantization.quantize(rows, numbers, blocks)
    scales = (-(-columns // blocks), -(-inner // blocks)) if blocks else (columns, 1)
    scaled_linear.scaled_linear(x, x_scale, weight, torch.empty(scales, device=META), block_size=blocks)


def few_bits(weight: torch.Tensor, tokens: int) -> None:
    """Call ``weight_only_linear`` with a scale for each 128 numbers, and ``linear`` with a weight as it is."""
    columns, stored = weight.shape
    inner = stored * (2 if weight.dtype is torch.uint8 else 1)
    rows = torch.empty(tokens, inner, dtype=torch.bfloat16, device=META)
    weight_only_linear.weight_only_linear(
        rows, weight, torch.empty(columns, inner // 128, dtype=rows.dtype, device=META)
    )
    linear.linear(rows, torch.empty(columns, inner, dtype=rows.dtype, device=META))


def quantized_experts(shape: tuple[int, int], kind: torch.dtype, blocks: int, tokens: int) -> None:
    """Call the quantized experts of a type; bytes without one are of two numbers of four bits."""
    number, chosen = shape
    states = torch.empty(tokens, 256, dtype=torch.bfloat16, device=META)
    weights, ids = torch.empty(tokens, chosen, device=META), integers(tokens, chosen)
    packed = 2 if kind is torch.uint8 else 1
    w13, w2 = (torch.empty(number, 256, inner // packed, dtype=kind, device=META) for inner in (256, 128))
    if packed == 2:
        scales = (torch.empty(number, 256, inner // 128, dtype=states.dtype, device=META) for inner in (256, 128))
        quantized_moe.weight_only_moe(states, w13, next(scales), w2, next(scales), weights, ids)
        return
    side, of = (2, 128) if blocks else (256, 128)
    columns = [torch.empty(number, side, inner // of if blocks else 1, device=META) for inner in (256, 128)]
    quantized_moe.scaled_moe(states, w13, columns[0], w2, columns[1], weights, ids, block_size=blocks)


def of_states(single: int, prompts: Sequence[int], apart: int) -> None:
    """The calls of layers with a state; slots of single tokens are a column of a table that is ``apart`` wide."""
    tokens, channels, heads, dim = single + sum(prompts), 512, 4, 64
    taps, inputs = torch.empty(channels, 4, device=META), torch.empty(99, 3, channels, device=META).transpose(1, 2)
    states, of_head = torch.empty(99, heads, dim, dim, device=META), torch.empty(heads, device=META)
    mixed, gates = (torch.empty(tokens, width, dtype=torch.bfloat16, device=META) for width in (channels, 2 * heads))
    query, key, value = (
        mixed[:, place * 128 :][:, : size * dim].unflatten(1, (size, dim)) for place, size in enumerate((2, 2, 4))
    )
    a, b = gates.split(heads, dim=1)
    for rows, batch in (
        (slice(single), (integers(single, apart)[:, 0],)),
        (
            slice(single, tokens),
            (
                integers(len(prompts)),
                integers(len(prompts) + 1),
                torch.empty(len(prompts), dtype=torch.bool, device=META),
            ),
        ),
    ):
        last = len(batch) == 1
        if not len(mixed[rows]):
            continue
        convolve = convolution.causal_conv1d_update if last else convolution.causal_conv1d
        convolve(mixed[rows], taps, None, inputs, *batch)
        correct = delta_rule.gated_delta_rule_update if last else delta_rule.gated_delta_rule
        correct(query[rows], key[rows], value[rows], a[rows], b[rows], of_head, of_head, states, *batch, scale=0.1)
        scan = state_space.selective_state_update if last else state_space.selective_scan
        scan(value[rows], a[rows], of_head, query[rows], key[rows], of_head, of_head, states, *batch)


def batches(limits: tuple[int, int, int]) -> st.SearchStrategy[tuple[list[int], int]]:
    """New tokens of requests, and the number of keys that is announced: the longest request's, or the largest ever."""
    length, tokens, requests = limits

    def scheduled(wanted: list[int], longest: int) -> tuple[list[int], int]:
        ends = [min(end, tokens) for end in accumulate(wanted)]
        queries = [end - start for start, end in zip([0, *ends], ends, strict=False) if end > start][:requests]
        queries = [min(new, length) for new in queries]
        return queries, min(length, max(longest, *queries, 1))

    new_tokens = st.one_of(st.just(1), st.integers(1, 16), st.integers(1, tokens))
    wanted = st.one_of(st.lists(new_tokens, min_size=1, max_size=20), st.integers(1, requests).map(lambda n: [1] * n))
    return st.builds(scheduled, wanted, st.one_of(st.integers(1, length), st.just(length)))


Call = Callable[[Sequence[int], int, int], None]
DTYPES = (torch.bfloat16, torch.float32)
PAGED = [(32, 8, 128), (4, 2, 16), (16, 16, 64), (7, 1, 128), (64, 8, 128)]


def compiled_at_start(keys: Keys, limits: tuple[int, int, int], call: Call) -> Keys:
    """The keys of all calls of the warm-up."""
    keys.clear()
    for queries, longest in warm_up._batches(config(limits)):
        call(queries, longest, -(-longest // 16))
    return set(keys)


def nothing_is_compiled_later(keys: Keys, limits: tuple[int, int, int], call: Call, drawn: int = 60) -> None:
    """Draw batches and compare."""
    known = compiled_at_start(keys, limits, call)

    @settings(max_examples=drawn, deadline=None)
    @given(batch=batches(limits), width=st.integers(1, 9000))
    def check(batch: tuple[list[int], int], width: int) -> None:
        keys.clear()
        call(*batch, width)
        assert keys <= known, batch

    check()


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("shape", PAGED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(keys: Keys, shape: tuple[int, int, int], dtype: torch.dtype, limits: tuple[int, int, int]) -> None:
    nothing_is_compiled_later(keys, limits, lambda *batch: attend(shape, dtype, *batch))


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("heads", [16, 128, 2])
def test_latent_attention(keys: Keys, heads: int, limits: tuple[int, int, int]) -> None:
    nothing_is_compiled_later(keys, limits, lambda *batch: latent(heads, torch.bfloat16, *batch))


@pytest.mark.parametrize("limits", LIMITS)
def test_latent_attention_on_hopper(keys: Keys, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int, int]) -> None:
    def record(
        tensors: Sequence[torch.Tensor], numbers: Sequence[Any], *, splits: int, most_new: int, **others: Any
    ) -> None:
        *strides, _table_row, scale, heads = numbers
        keys.add(
            ("decode_latent", *strides, scale, heads, others["block_size"], others["causal"], most_new, splits > 1)
        )

    monkeypatch.setattr(hopper, "fits_latent", lambda *tensors: True)
    monkeypatch.setattr(hopper, "latent_slots", lambda device: PROCESSORS)
    monkeypatch.setattr(hopper, "decode_latent", record)
    nothing_is_compiled_later(keys, limits, lambda *batch: latent(128, torch.bfloat16, *batch))
    assert any(
        key[0] == "decode_latent"
        for key in compiled_at_start(keys, limits, lambda *batch: latent(128, torch.bfloat16, *batch))
    )


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("shape", [(128, 8), (64, 6), (8, 2), (256, 8), (60, 4), (100, 3)])
def test_experts(keys: Keys, shape: tuple[int, int], limits: tuple[int, int, int]) -> None:
    for tokens in warm_up.token_counts(config(limits)):
        experts(shape, torch.bfloat16, tokens)
    known = set(keys)

    @settings(max_examples=100, deadline=None)
    @given(tokens=st.integers(1, limits[1]))
    def check(tokens: int) -> None:
        keys.clear()
        experts(shape, torch.bfloat16, tokens)
        assert keys <= known, tokens

    check()


def same_for_any_number_of_tokens(keys: Keys, limits: tuple[int, int, int], call: Callable[[int], None]) -> None:
    """Call with the start's numbers of tokens, then with drawn ones, and compare."""
    keys.clear()
    for tokens in warm_up.token_counts(config(limits)):
        call(tokens)
    known = set(keys)
    assert known

    @settings(max_examples=60, deadline=None)
    @given(tokens=st.integers(1, limits[1]) | st.integers(1, min(300, limits[1])))
    def check(tokens: int) -> None:
        keys.clear()
        call(tokens)
        assert keys <= known, tokens

    check()


SIZES = [(6144, 4096), (28672, 4096), (4096, 14336), (3072, 2048), (576, 2048), (256, 128)]
"""Columns and numbers of a column, of Llama-3.1-8B, of DeepSeek-V2-Lite, and of a small model."""
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("limits", LIMITS[:2])
@pytest.mark.parametrize(("kind", "blocks"), [(torch.int8, 0), (FP8, 0), (FP8, 128)])
@pytest.mark.parametrize("size", SIZES)
def test_quantized_products(
    keys: Keys, size: tuple[int, int], kind: torch.dtype, blocks: int, limits: tuple[int, int, int]
) -> None:
    weight = torch.empty(size, dtype=kind, device=META)
    same_for_any_number_of_tokens(keys, limits, lambda tokens: product(weight, blocks, tokens))


@pytest.mark.parametrize("limits", LIMITS[:2])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, FP8])
@pytest.mark.parametrize("size", SIZES)
def test_products_of_few_bits(
    keys: Keys, size: tuple[int, int], kind: torch.dtype, limits: tuple[int, int, int]
) -> None:
    columns, inner = size
    weight = torch.empty(columns, inner // (2 if kind is torch.uint8 else 1), dtype=kind, device=META)
    same_for_any_number_of_tokens(keys, limits, lambda tokens: few_bits(weight, tokens))


@pytest.mark.parametrize("limits", LIMITS[:2])
@pytest.mark.parametrize(("kind", "blocks"), [(torch.int8, 0), (FP8, 0), (FP8, 128), (torch.uint8, 0)])
@pytest.mark.parametrize("shape", [(128, 8), (64, 6), (8, 2), (100, 3)])
def test_quantized_experts(
    keys: Keys, shape: tuple[int, int], kind: torch.dtype, blocks: int, limits: tuple[int, int, int]
) -> None:
    same_for_any_number_of_tokens(keys, limits, lambda tokens: quantized_experts(shape, kind, blocks, tokens))


@pytest.mark.parametrize("limits", LIMITS)
def test_states(keys: Keys, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int, int]) -> None:
    for module, name, answer in (
        (delta_rule, "processors", PROCESSORS),
        (delta_rule, "shared_memory", 0),
        (state_space, "shared_memory", 0),
    ):
        monkeypatch.setattr(module, name, lambda device, answer=answer: answer)
    for single, prompts in warm_batches.state_batches(*limits[1:]):
        of_states(single, prompts, 1)
    known = set(keys)
    assert len({key[0] for key in known}) > 5

    @settings(max_examples=100, deadline=None)
    @given(batch=batches(limits), apart=st.sampled_from((1, 5, 32)))
    def check(batch: tuple[list[int], int], apart: int) -> None:
        keys.clear()
        of_states(batch[0].count(1), [new for new in batch[0] if new > 1], apart)
        assert keys <= known, batch

    check()


def test_a_batch_that_the_start_leaves_out_is_noticed(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_batches, "QUERIES", (1,))
    with pytest.raises(AssertionError):
        nothing_is_compiled_later(keys, LIMITS[1], lambda *batch: attend(PAGED[0], torch.bfloat16, *batch), drawn=1000)

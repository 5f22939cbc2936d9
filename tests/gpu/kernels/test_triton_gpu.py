"""Our Triton kernels on a GPU: all inputs in all dtypes, the short launch, and compiled code."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from fl_dispatch.evidence.verify import DTYPES

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from fl_dispatch import get_default_manager
from fl_dispatch.backends.triton.impl import hopper, launch
from fl_dispatch.backends.triton.impl.attention import index_topk, latent_decode, latent_prefill, paged, sparse_latent
from fl_dispatch.backends.triton.impl.rows import activation
from fl_dispatch.backends.triton.register_ops import IMPL_ID, ROWS
from fl_dispatch.devices.launcher import prepares
from fl_dispatch.evidence.verify import implementations, verify
from fl_dispatch.ops import OPERATORS

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
OURS = {row.op_name: not row.opaque for row in ROWS if row.impl_id == IMPL_ID}
"""Operator → whether Dynamo traces its kernel."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in OURS if name != "fused_linear"])  # it declines several rows
def test_a_kernel_is_right(name: str, dtype: torch.dtype) -> None:
    manager = get_default_manager()
    (impl,) = implementations(manager, [name], ["default.triton"])
    found = verify(manager, impl, dtype, CUDA)
    assert found.problems == []
    assert not found.declined


@pytest.mark.parametrize("bits", [8, 11])
def test_a_list_is_right_whose_scores_several_programs_share(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    for constant in ("SELECTING", "SELECTING_DECODE"):
        monkeypatch.setattr(index_topk, constant, (64, 32, bits, 4))
    manager = get_default_manager()
    (impl,) = implementations(manager, ["index_topk"], ["default.triton"])
    assert verify(manager, impl, torch.bfloat16, CUDA).problems == []


def test_the_short_launch_runs_what_the_public_one_runs_for_every_stride_and_alignment() -> None:
    launcher = activation._launch
    memory = torch.randn(4 * 4096 + 64, device=CUDA, dtype=torch.bfloat16)
    for offset in (0, 1, 8):
        for width, stride in ((64, 128), (64, 136), (67, 134), (67, 150), (512, 1024)):
            x = memory.as_strided((4, 2 * width), (stride, 1), offset)
            outputs = []
            for short in (False, None, None):
                launcher._short = short
                outputs.append(activation.silu_and_mul(x))
            assert torch.equal(outputs[0], outputs[1])
            assert torch.equal(outputs[0], outputs[2])


def test_the_short_launch_is_taken_where_it_is_tested() -> None:
    activation._launch._short = None
    activation.silu_and_mul(torch.randn(1, 64, device=CUDA))
    assert activation._launch._short == prepares()


@pytest.mark.parametrize("name", [name for name in OURS if OURS[name] and name != "rotary_embedding"])
def test_dynamo_traces_a_kernel_without_a_graph_break(name: str) -> None:
    torch._dynamo.reset()
    (impl,) = implementations(get_default_manager(), [name], ["default.triton"])
    fn: Any = impl.fn
    (first, *_) = OPERATORS[name].samples(torch.bfloat16, CUDA, torch.Generator().manual_seed(0))
    compiled, eager = torch.compile(fn, fullgraph=True)(*first.args), fn(*first.args)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


@pytest.fixture
def on_hopper() -> None:
    reason = hopper.why_unavailable(CUDA)
    if reason:
        pytest.skip(reason)


def by_both(fn: Any, args: tuple[Any, ...], fits: str = "fits", where: tuple[int, ...] = (0, 1, 2)) -> Any:
    """Three results of the kernel for Hopper, and the plain kernel's; ``fits`` asks for the arguments at ``where``."""
    assert getattr(hopper, fits)(*[args[index] for index in where])
    special = [fn(*args) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, fits, lambda *tensors: False)
        plain = fn(*args)
    return special, plain


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dim", "block_size", "dtype"), [(128, 16, "bfloat16"), (64, 16, "float16"), (128, 1, "bfloat16")]
)
def test_long_requests_on_hopper(dim: int, block_size: int, dtype: str, causal: bool) -> None:
    requests = [(200, 333), (1, 40), (128, 128), (257, 1000), (64, 1027), (130, 2048), (1500, 1500)]
    requests += [(n % 5, 20 + n) for n in range(300)]  # more than are looked at together
    generator = torch.Generator(CUDA).manual_seed(0)
    pages = [-(-length // block_size) for _, length in requests]
    table = torch.full((len(requests), max(pages)), -1, dtype=torch.int32, device=CUDA)
    cache = torch.full((sum(pages) + 1, 8, block_size, 2 * dim), float("nan"), device=CUDA).transpose(1, 2)
    order = torch.randperm(sum(pages), device=CUDA, generator=generator).split(pages)
    for row, mine, (_, length) in zip(table, order, requests, strict=True):
        row[: len(mine)] = mine
        position = torch.arange(length, device=CUDA)
        filled = torch.randn(length, 8, 2 * dim, device=CUDA, generator=generator)
        cache[mine[position // block_size], position % block_size] = filled
    cache = cache.transpose(1, 2).to(getattr(torch, dtype)).contiguous().transpose(1, 2)
    starts = torch.tensor([0, *accumulate(new for new, _ in requests)], dtype=torch.int32, device=CUDA)
    lengths = torch.tensor([length for _, length in requests], dtype=torch.int32, device=CUDA)
    query = torch.randn(int(starts[-1]), 32, dim, device=CUDA, generator=generator).to(cache.dtype)
    args = (query, cache[..., :dim], cache[..., dim:], table, starts, lengths, 1500, 2048, dim**-0.5, None, causal)
    special, plain = by_both(paged.paged_attention, args)
    for result in special:
        torch.testing.assert_close(result, plain, rtol=1.6e-2, atol=4e-3)
        assert torch.equal(result, special[0])


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype"), [(192, 128, "bfloat16"), (128, 128, "float16"), (64, 64, "bfloat16")]
)
def test_latent_prefill_on_hopper(dim: int, dim_v: int, dtype: str, causal: bool) -> None:
    if not hopper._copies_in_bulk():
        pytest.skip("the kernel of keys in a row is not tested with this Triton")
    requests = [(200, 333), (300, 100), (1, 7), (129, 1024), (0, 5), (512, 512), (40, 77)]
    torch.manual_seed(0)
    starts, key_starts = (
        torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=CUDA) for each in zip(*requests, strict=True)
    )
    query, key, value = (
        torch.randn(int(each[-1]), 16, size, device=CUDA).to(getattr(torch, dtype))
        for each, size in ((starts, dim), (key_starts, dim), (key_starts, 2 * dim_v))
    )
    bad = slice(int(key_starts[2]), int(key_starts[3]))
    key[bad], value[bad] = float("nan"), float("inf")  # which no other request may see
    args = (query, key, value[..., dim_v:], starts, key_starts, 512, 1024, dim**-0.5, None, causal)
    special, (plain, plain_lse) = by_both(latent_prefill.mla_prefill, args, "fits_in_a_row", (0, 1, 2, 0))
    mine = int(starts[2])  # the one new token of the request with NaNs
    others = torch.arange(len(plain), device=CUDA) != mine
    for result, lse in special:
        assert not result[mine].isfinite().any()
        torch.testing.assert_close(result[others], plain[others], rtol=1.6e-2, atol=4e-3)
        torch.testing.assert_close(lse[:, others], plain_lse[:, others], rtol=1e-3, atol=1e-3)
        assert torch.equal(result[others], special[0][0][others])


def latent_batch(heads: int, requests: int, block_size: int, dtype: str, causal: bool) -> tuple[Any, ...]:
    """Arguments of ``mla_decode`` for requests of up to three new tokens; unused slots of the cache are NaN."""
    generator = torch.Generator(CUDA).manual_seed(0)
    new, length = [1 + n % 3 for n in range(requests)], [3 + n * 997 % 2048 for n in range(requests)]
    pages = [-(-each // block_size) for each in length]
    table = torch.full((requests, max(pages)), -1, dtype=torch.int32, device=CUDA)
    cache = torch.full((sum(pages) + 1, block_size, 576), float("nan"), dtype=getattr(torch, dtype), device=CUDA)
    order = torch.randperm(sum(pages), device=CUDA, generator=generator).split(pages)
    for row, mine, keys in zip(table, order, length, strict=True):
        row[: len(mine)] = mine
        position = torch.arange(keys, device=CUDA)
        filled = torch.randn(keys, 576, device=CUDA, generator=generator).to(cache.dtype)
        cache[mine[position // block_size], position % block_size] = filled
    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=CUDA)
    lengths = torch.tensor(length, dtype=torch.int32, device=CUDA)
    query = torch.randn(sum(new), heads, 576, device=CUDA, generator=generator).to(cache.dtype)
    return (query, cache, table, starts, lengths, 3, 2048, 192**-0.5, 512, None, causal)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("heads", "requests", "block_size", "dtype"),
    [(128, 9, 64, "bfloat16"), (128, 88, 64, "bfloat16"), (64, 9, 16, "float16"), (96, 90, 1, "bfloat16")],
)
@pytest.mark.parametrize("divided", [True, False])
def test_latent_decoding_on_hopper(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    requests: int,
    block_size: int,
    dtype: str,
    divided: bool,
    causal: bool,
) -> None:
    monkeypatch.setattr(latent_decode, "_splits", lambda slots, programs, most: 3 if divided else 1)
    whole = latent_batch(heads, requests, block_size, dtype, causal)
    query = whole[0]
    rope = torch.cat((query[..., :128], query[..., 512:]), dim=-1)[..., 128:]  # behind what is not absorbed, as in vLLM
    args = (query[..., :512].contiguous(), *whole[1:], None, rope)
    special, plain = by_both(latent_decode.mla_decode, args, "fits_latent", (0, 12, 1))
    for result in special:
        torch.testing.assert_close(result, plain, rtol=1.6e-2, atol=4e-3)
        assert torch.equal(result, special[0])
    assert torch.equal(latent_decode.mla_decode(*whole), special[0])


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("width", [2048, 200])
@pytest.mark.parametrize(
    ("heads", "requests", "block_size", "dtype"),
    [(128, 9, 64, "bfloat16"), (128, 88, 64, "bfloat16"), (64, 9, 16, "float16"), (96, 90, 1, "bfloat16")],
)
@pytest.mark.parametrize("divided", [True, False])
def test_listed_rows_on_hopper(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    requests: int,
    block_size: int,
    dtype: str,
    divided: bool,
    width: int,
) -> None:
    """Lists of all lengths, none among them, of a query in two parts."""
    monkeypatch.setattr(hopper, "TESTED_LISTS", (hopper._version(),))
    monkeypatch.setattr(sparse_latent, "_splits", lambda slots, programs, most: 3 if divided else 1)
    whole, cache, table, starts, lengths, *_ = latent_batch(heads, requests, block_size, dtype, True)
    lists = torch.full((len(whole), width), -1, dtype=torch.int32, device=CUDA)
    for request, length in enumerate(lengths.tolist()):
        for token in range(int(starts[request]), int(starts[request + 1])):
            some = torch.randperm(length, device=CUDA)[: token * 37 % (width + 1)]
            lists[token, : len(some)] = some.sort().values
    query, rope = whole[..., :512].contiguous(), torch.cat((whole[..., :128], whole[..., 512:]), dim=-1)[..., 128:]
    args = (query, cache, lists, table, starts, 3, 192**-0.5, 512, None, None, rope)
    special, plain = by_both(sparse_latent.mla_sparse, args, "fits_listed", (0, 10, 1))
    for result in special:
        torch.testing.assert_close(result, plain, rtol=1.6e-2, atol=4e-3)
        assert torch.equal(result, special[0])


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("constants", [(3, 2, 64, 8), (4, 1, 64, 8), (2, 2, 128, 4)])
@pytest.mark.parametrize(("heads", "block_size"), [(64, 64), (64, 16), (32, 1)])
def test_index_scores_on_hopper(
    monkeypatch: pytest.MonkeyPatch, heads: int, block_size: int, constants: tuple[int, int, int, int]
) -> None:
    """Prompts, their last tokens, a decode and a request without tokens, in chunks of queries."""
    monkeypatch.setattr(hopper, "TESTED_SCORES", (hopper._version(),))
    monkeypatch.setattr(index_topk, "SCORING_HOPPER", constants)
    monkeypatch.setattr(index_topk, "MOST_SCORES", 4096 * 700)
    new, lengths = torch.tensor([1500, 1, 0, 300, 77]), torch.tensor([1500, 4000, 50, 3001, 2100])
    blocks = -(-4096 // block_size)
    table = torch.randperm(len(new) * blocks, device=CUDA).view(len(new), blocks).int()
    starts = torch.cat((torch.zeros(1), new.cumsum(0))).int().to(CUDA)
    keys = torch.randn(len(new) * blocks, block_size, 128, device=CUDA).to(torch.float8_e4m3fn)
    scales = torch.rand(len(new) * blocks, block_size, 1, device=CUDA) + 0.5
    query = torch.randn(int(new.sum()), heads, 128, device=CUDA).bfloat16()
    args = (query, torch.randn(query.shape[:2], device=CUDA), keys, table, starts, lengths.int().to(CUDA), 1500, 4000)
    assert hopper.fits_scores(query.to(keys.dtype), keys)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **rest: empty(*args, **rest).fill_(torch.nan))
    out = torch.empty(len(query), 64, dtype=torch.int32, device=CUDA)

    def scores() -> torch.Tensor:
        found = list[torch.Tensor]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(index_topk, "_best", lambda scores, *rest: found.append(scores))
            index_topk.index_topk(*args, 64, out, scales)
        return torch.cat(found)

    special = [scores() for _ in range(3)]
    monkeypatch.setattr(hopper, "fits_scores", lambda *tensors: False)
    plain = scores()
    for result in special:
        torch.testing.assert_close(result, plain, rtol=1e-4, atol=1e-2, equal_nan=True)
        assert torch.equal(result.nan_to_num(), special[0].nan_to_num())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("heads", "requests", "block_size", "dtype"),
    [(128, 9, 64, "bfloat16"), (128, 88, 64, "bfloat16"), (16, 9, 16, "float16"), (96, 90, 1, "bfloat16")],
)
@pytest.mark.parametrize("divided", [True, False])
def test_latent_decoding_over_a_cache_in_fp8(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    requests: int,
    block_size: int,
    dtype: str,
    divided: bool,
    causal: bool,
) -> None:
    """It is that over the rows for which the cache stands; a power of two as scale leaves them exact in a half type."""
    if (compiled := launch.compiles(torch.float8_e4m3fn, CUDA)) is not True:
        pytest.skip(str(compiled))
    monkeypatch.setattr(latent_decode, "_splits", lambda slots, programs, most: 3 if divided else 1)
    monkeypatch.setattr(hopper, "fits_latent", lambda *tensors: False)
    query, rows, *rest = latent_batch(heads, requests, block_size, dtype, causal)
    stored = (rows.float() * 32).to(torch.float8_e4m3fn)
    plain = latent_decode.mla_decode(query, (stored.float() / 32).to(query.dtype), *rest)
    found = [latent_decode.mla_decode(query, stored, *rest, 1 / 32) for _ in range(3)]
    for result in found:
        torch.testing.assert_close(result, plain, rtol=1.6e-2, atol=4e-3)
        assert torch.equal(result, found[0])
    wrong = latent_decode.mla_decode(query, stored, *rest, 1.1 / 32)
    assert (wrong - plain).float().norm() > 20 * (found[0] - plain).float().norm()

"""Products with the low-rank factors of adapters (LoRA; Hu et al., arXiv 2106.09685), many adapters in one batch.

A layer has a slot for each adapter in memory with its factors ``down`` and ``up``; their product is added to the
weights. A merged layer, such as that of queries, keys and values, has up to :data:`PARTS` such pairs: *parts*.

All four tensors of the mapping assign adapters to tokens, each in a form that some implementation needs. Their sizes do
not depend on the batch, so that captured graphs read the current batch's mapping.

References multiply with every slot, and each token selects its result, so a graph can hold them: only values depend on
the mapping. A slot with factors that are not finite does not affect tokens of other adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .declaration import (
    SEVERAL_ROUNDINGS,
    Access,
    Mode,
    Place,
    Sample,
    Shape,
    Work,
    Write,
    operator,
    row_terms,
    tokens_workload,
)
from .inputs.source import Source

PARTS = 3
FEW = 64
"""Rows of a small batch, for which implementations may have other kernels."""
MODES = frozenset({Mode.INLINE, Mode.OPAQUE, Mode.EAGER})
RANKS = (16, 64)
"""Ranks that benchmarks measure."""
SLOTS = 4


def mapping(adapters: Sequence[int], slots: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of a mapping: ``adapters``, ``order``, ``starts`` and ``active``.

    Args:
        adapters: the slot of each token's adapter, -1 for none.
        slots: number of slots of a layer.
        device: device of the first three tensors.
    """
    of_tokens = torch.tensor(adapters, dtype=torch.int32)
    ordered, order = of_tokens.where(of_tokens >= 0, slots).sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(slots + 1, dtype=torch.int32))
    active = torch.tensor([len({*adapters} - {-1})], dtype=torch.int32)
    return of_tokens.to(device), order.to(device, torch.int32), starts.to(device, torch.int32), active


def given(*parts: Tensor | None) -> list[Tensor]:
    """Return the factors of a call's parts."""
    return [part for part in parts if part is not None]


def _used(starts: Tensor) -> tuple[int, int]:
    """Return the number of tokens with an adapter, and the number of adapters with a token."""
    counts = starts.diff()
    return int(counts.sum()), int((counts > 0).sum())


# -- to the rank ------------------------------------------------------------------------------------------------------


def _shrink_fake(out: Tensor) -> Tensor:
    return out


def _shrink_work(
    x: Tensor, out: Tensor, down: Tensor, starts: Tensor, down_2: Tensor | None, down_3: Tensor | None
) -> Work:
    tokens, used = _used(starts)
    parts, (_, rank, inner) = len(given(down, down_2, down_3)), down.shape
    read = tokens * inner * x.element_size() + parts * used * rank * inner * down.element_size()
    return Work(read + parts * tokens * rank * out.element_size(), 2 * parts * tokens * rank * inner)


def _shrink_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    normal = Source(dtype, device, generator).normal

    def sample(
        label: str, adapters: Sequence[int], slots: int, rank: int, inner: int, parts: int = 1, *, serving: bool = True
    ) -> Sample:
        out = torch.zeros(parts, len(adapters), rank, device=device, dtype=torch.promote_types(dtype, torch.float32))
        factors = [normal(slots, rank, inner, scale=inner**-0.5) for _ in range(parts)]
        others = [*factors[1:], None, None][: PARTS - 1]
        mapped = mapping(adapters, slots, device)
        return Sample(label, (normal(len(adapters), inner), out, factors[0], *mapped, 1.0, *others), serving)

    yield sample("one token, 3 parts", [0], 1, 16, 1024, 3)
    yield sample("decode, 2 adapters and none", [1, -1, 0, 1, 0, -1, 1, 1], 3, 16, 2048, 3)
    yield sample("prefill, 2 parts", [2] * 70 + [-1] * 9 + [0] * 21, 4, 32, 512, 2)
    yield sample("empty mapping", [-1] * 5, 2, 16, 256)
    yield sample("a long row", [0, 1, -1, 1], 2, 8, 5000)
    yield sample("odd sizes", [3, 0, 3, -1, 1], 4, 5, 77, 2, serving=False)
    yield sample("rank 128", [0] * 3 + [1], 2, 128, 96, serving=False)
    x, out, *rest = sample("", [1, 0, 1], 2, 16, 64).args
    yield Sample("a scale", (x, out, *rest[:5], 0.5, None, None), serving=False)
    apart = normal(3, 100)[:, 20:84]
    yield Sample("rows apart", (apart, out, *rest), serving=False)
    yield sample("empty batch", [], 2, 16, 64, serving=False)


def _shrink_shapes(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    for inner in hidden:
        for rank in RANKS:
            for count in tokens:

                def make(place: Place, count: int = count, inner: int = inner, rank: int = rank) -> tuple[object, ...]:
                    factors = [place.normal(SLOTS, rank, inner, scale=inner**-0.5) for _ in range(PARTS)]
                    out = place.normal(PARTS, count, rank, dtype=torch.float32)
                    mapped = mapping([0] * count, SLOTS, place.index_device)
                    return place.normal(count, inner), out, factors[0], *mapped, 1.0, *factors[1:]

                yield Shape(f"rank {rank}", count, inner, make)


def _idle(active: Tensor) -> bool:
    """Whether no token has an adapter; compiled code must not ask, because it would keep the answer."""
    return not torch.compiler.is_compiling() and active.item() == 0


@operator(
    writes={"out": Write(Access.UPDATE)},
    modes=MODES,
    fake=_shrink_fake,
    samples=_shrink_samples,
    shapes=_shrink_shapes,
    aliases=("sgmv_shrink", "bgmv_shrink"),
    terms=row_terms,
    workload=tokens_workload,
    work=_shrink_work,
)
def lora_shrink(
    x: Tensor,
    out: Tensor,
    down: Tensor,
    adapters: Tensor,
    order: Tensor,
    starts: Tensor,
    active: Tensor,
    scale: float = 1.0,
    down_2: Tensor | None = None,
    down_3: Tensor | None = None,
) -> Tensor:
    """Rows times the first factor of their adapters: ``out[part, token] = scale * down[adapter] @ x[token]``.

    Products are summed at least in float32. Rows of tokens without an adapter stay unchanged.

    Args:
        x: ``[tokens, inner]``, floating point.
        out: ``[parts, tokens, rank]``, floating point, usually float32. Rows of tokens with an adapter are overwritten;
            shares no memory with another argument.
        down: ``[slots, rank, inner]``, dtype of ``x``.
        adapters: ``[tokens]``, int32: the slot of each token's adapter, -1 for none.
        order: ``[tokens]``, int32: the tokens sorted by slot; those without an adapter last.
        starts: ``[slots + 1]``, int32: index in ``order`` of each slot's first token, and the end of the last slot's.
        active: ``[1]``, int32, in host memory: number of adapters in the batch; 0 if there is nothing to do.
        scale: a factor of the products.
        down_2, down_3: factors of the other parts, same shape as ``down``, or ``None``.

    Returns:
        ``out``.
    """
    if _idle(active):
        return out
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    for part, factors in enumerate(given(down, down_2, down_3)):
        product = out[part]
        for slot in range(factors.shape[0]):
            own = (wide @ factors[slot].to(wide.dtype).t() * scale).to(out.dtype)
            product = torch.where((adapters == slot)[:, None], own, product)
        out[part].copy_(product)
    return out


# -- from the rank ----------------------------------------------------------------------------------------------------


def _expand_fake(y: Tensor) -> Tensor:
    return y


def _expand_work(
    y: Tensor, products: Tensor, up: Tensor, starts: Tensor, up_2: Tensor | None, up_3: Tensor | None
) -> Work:
    tokens, used = _used(starts)
    rank, width = products.shape[2], sum(part.shape[1] for part in given(up, up_2, up_3))
    read = tokens * products.shape[0] * rank * products.element_size() + used * width * rank * up.element_size()
    return Work(read + 2 * tokens * width * y.element_size(), 2 * tokens * width * rank)


def _expand_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    normal = Source(dtype, device, generator).normal

    def sample(
        label: str,
        adapters: Sequence[int],
        slots: int,
        rank: int,
        widths: Sequence[int],
        *,
        offset: int = 0,
        beyond: int = 0,
        half: bool = False,
        serving: bool = True,
    ) -> Sample:
        y = normal(len(adapters), offset + sum(widths) + beyond)
        products = normal(len(widths), len(adapters), rank)
        if not half:
            products = products.to(torch.promote_types(dtype, torch.float32))
        factors = [normal(slots, width, rank, scale=rank**-0.5) for width in widths]
        others = [*factors[1:], None, None][: PARTS - 1]
        mapped = mapping(adapters, slots, device)
        return Sample(label, (y, products, factors[0], *mapped, offset, *others), serving)

    yield sample("one token, 3 parts", [0], 1, 16, (512, 128, 128))
    yield sample("decode, 2 adapters and none", [1, -1, 0, 1, 0, -1, 1, 1], 3, 16, (256, 64, 64))
    yield sample("prefill, 2 parts", [2] * 70 + [-1] * 9 + [0] * 21, 4, 32, (192, 192))
    yield sample("empty mapping", [-1] * 5, 2, 16, (64,))
    yield sample("a part of the columns", [0, 1, 0], 2, 8, (48,), offset=16, beyond=5)
    yield sample("odd sizes", [3, 0, 3, -1, 1], 4, 5, (33, 7), serving=False)
    yield sample("rank 128", [0] * 3 + [1], 2, 128, (96,), serving=False)
    yield sample("products as wide as the factors", [1, 0, -1], 2, 16, (64,), half=True, serving=False)
    y, products, up, *rest = sample("", [1, 0, 1], 2, 16, (64,)).args
    yield Sample("rows apart", (normal(3, 100)[:, 20:84], products, up, *rest), serving=False)
    yield Sample("fewer columns of a factor", (y[:, :40], products, up[:, :40], *rest), serving=False)
    yield sample("empty batch", [], 2, 16, (64,), serving=False)


def _expand_shapes(tokens: Sequence[int], hidden: Sequence[int]) -> Iterator[Shape]:
    for width in hidden:
        for rank in RANKS:
            for count in tokens:

                def make(place: Place, count: int = count, width: int = width, rank: int = rank) -> tuple[object, ...]:
                    factors = [place.normal(SLOTS, width, rank, scale=rank**-0.5) for _ in range(PARTS)]
                    products = place.normal(PARTS, count, rank, dtype=torch.float32)
                    mapped = mapping([0] * count, SLOTS, place.index_device)
                    return place.normal(count, PARTS * width), products, factors[0], *mapped, 0, *factors[1:]

                yield Shape(f"rank {rank}", count, width, make)


@operator(
    writes={"y": Write(Access.UPDATE)},
    modes=MODES,
    fake=_expand_fake,
    samples=_expand_samples,
    shapes=_expand_shapes,
    aliases=("sgmv_expand", "bgmv_expand"),
    mean_error=SEVERAL_ROUNDINGS,
    workload=tokens_workload,
    work=_expand_work,
)
def lora_expand(
    y: Tensor,
    products: Tensor,
    up: Tensor,
    adapters: Tensor,
    order: Tensor,
    starts: Tensor,
    active: Tensor,
    offset: int = 0,
    up_2: Tensor | None = None,
    up_3: Tensor | None = None,
) -> Tensor:
    """Add rows times the second factor of their adapters: ``y[token] += up[adapter] @ products[part, token]``.

    The columns of the parts are adjacent, from ``offset`` on. Rows of tokens without an adapter, and other columns,
    stay unchanged. An implementation may round ``products`` to the dtype of ``up``.

    Args:
        y: ``[tokens, columns]``, floating point. Overwritten; shares no memory with another argument.
        products: ``[parts, tokens, rank]``, floating point, for example from :data:`lora_shrink`. Rows of tokens
            without an adapter may hold anything.
        up: ``[slots, width, rank]``, floating point.
        adapters, order, starts, active: see :data:`lora_shrink`.
        offset: the first part's first column.
        up_2, up_3: factors of the other parts, ``[slots, their width, rank]``, or ``None``.

    Returns:
        ``y``.
    """
    if _idle(active):
        return y
    for part, factors in enumerate(given(up, up_2, up_3)):
        end = offset + factors.shape[1]
        columns = y[:, offset:end]
        wide = products[part].to(torch.promote_types(y.dtype, torch.float32))
        total = columns
        for slot in range(factors.shape[0]):
            own = (columns + wide @ factors[slot].to(wide.dtype).t()).to(y.dtype)
            total = torch.where((adapters == slot)[:, None], own, total)
        columns.copy_(total)
        offset = end
    return y

"""SGLang's kernels of speculation in Triton's interpreter, and our forms on the same inputs: python FILE JOB ANSWER.

A process of its own, because Triton must be in its interpreter when SGLang defines the kernels. The answer is
``{"differing": {name: what differs}, "ran": [...]}``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["SGLANG_PLUGINS"] = "none"

import torch
from torch import Tensor

from sglang_fl.speculation import forms, kernel_hooks

with kernel_hooks.stand_in():
    from sglang.kernels.ops.speculative import reconstruct_tree
from sglang.kernels.ops.speculative import cache_locs, eagle, reject_sampling, spec_tree
from sglang.srt.mem_cache import allocation
from sglang.srt.utils import next_power_of_2

REQUESTS, WIDTH, VOCABULARY, LONGEST = 5, 4, 7, 40
Case = Callable[[torch.Generator], tuple[Sequence[Any], Sequence[Tensor]]]


def integers(draw: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=draw)


def chances(draw: torch.Generator, *shape: int) -> Tensor:
    """Distributions, of which some rule tokens out."""
    logits = 2 * torch.randn(*shape, VOCABULARY, generator=draw)
    logits[torch.rand(logits.shape, generator=draw) < 0.2] = -20.0
    return logits.softmax(-1)


def chain(draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Places, successors and siblings of chains, of which some end early."""
    places = torch.arange(REQUESTS * WIDTH).view(REQUESTS, WIDTH)
    columns = torch.arange(WIDTH)
    ends = integers(draw, WIDTH, REQUESTS, 1)
    return places, torch.where(columns < ends, columns + 1, -1), torch.full_like(places, -1)


def accepted() -> tuple[Tensor, Tensor, Tensor]:
    """The tensors that are written about accepted drafts."""
    return torch.zeros(REQUESTS * WIDTH).int(), torch.full((REQUESTS, WIDTH), -1).int(), torch.zeros(REQUESTS).int()


def proposals(draw: torch.Generator, topk: int, steps: int, width: int) -> tuple[Tensor, Tensor]:
    """Which proposals were continued, and which are checked, as SGLang's drafter finds them by random scores."""
    scores = torch.rand(REQUESTS, topk, generator=draw)
    seen, parents = [scores], [torch.arange(-1, topk).repeat(REQUESTS, 1)]
    for step in range(1, steps):
        further = scores[..., None] * torch.rand(REQUESTS, topk, topk, generator=draw)
        scores, best = further.flatten(1).topk(topk)
        seen.append(further.flatten(1))
        parents.append(best + topk * topk * (step - 1) + topk)
    nothing = torch.empty(REQUESTS, 0, dtype=torch.long)
    return torch.cat([nothing, *parents[:-1]], 1), torch.cat(seen, 1).topk(width - 1).indices.sort().values


def build(topk: int, steps: int, width: int) -> Case:
    def case(draw: torch.Generator) -> tuple[Sequence[Any], Sequence[Tensor]]:
        mask = torch.ones(REQUESTS * width * width, dtype=torch.bool)
        written = (mask, torch.zeros(REQUESTS * width).long(), *torch.full((3, REQUESTS, width), -1))
        rest = (topk, steps, width, spec_tree.TreeMaskMode.QLEN_ONLY)
        return (*proposals(draw, topk, steps, width), integers(draw, 9, REQUESTS), *written, *rest), written

    return case


def tree(draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Places, first continuations and siblings of trees."""
    arguments, (_, _, *links) = build(2, WIDTH - 1, WIDTH)(draw)
    forms.build_tree(*arguments)
    return links[0], links[1], links[2]


def read(draw: torch.Generator) -> tuple[Sequence[Any], Sequence[Tensor]]:
    mask = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril().repeat(REQUESTS, 1, 1)
    written = (torch.zeros(REQUESTS * WIDTH).long(), *torch.full((3, REQUESTS, WIDTH), -1))
    return (mask.flatten(), integers(draw, 9, REQUESTS), *written, REQUESTS, WIDTH), written


def greedy(links: Callable[[torch.Generator], tuple[Tensor, Tensor, Tensor]]) -> Case:
    def case(draw: torch.Generator) -> tuple[Sequence[Any], Sequence[Tensor]]:
        written = accepted()
        tokens = integers(draw, 2, REQUESTS, WIDTH), *links(draw), integers(draw, 2, REQUESTS, WIDTH)
        return (*written, *tokens), written

    return case


def rejection(draw: torch.Generator) -> tuple[Sequence[Any], Sequence[Tensor]]:
    written, places = accepted(), chain(draw)[0]
    coins = torch.rand(REQUESTS, WIDTH, generator=draw), torch.rand(REQUESTS, generator=draw)
    probabilities = chances(draw, REQUESTS, WIDTH), chances(draw, REQUESTS, WIDTH - 1)
    tokens = integers(draw, VOCABULARY, REQUESTS, WIDTH), places, None, None
    return (*written, *tokens, *coins, *probabilities, 1.0, 1.0, True), written


def table(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """The states of requests, and the slots of their tokens."""
    return torch.randperm(8, generator=draw)[:REQUESTS], integers(draw, 99, 8, LONGEST).int()


def drafts(draw: torch.Generator) -> tuple[Sequence[Any], Sequence[Tensor]]:
    written = torch.zeros(REQUESTS * WIDTH).long(), torch.zeros(REQUESTS).long(), torch.zeros(3, REQUESTS).long()
    return (*table(draw), integers(draw, 30, REQUESTS), written[0], 1, WIDTH, *written[1:]), written


def write(draw: torch.Generator) -> tuple[Sequence[Any], Sequence[Tensor]]:
    states, slots = table(draw)
    starts = integers(draw, 20, REQUESTS).int()
    ends = starts + integers(draw, 9, REQUESTS).int()
    new = integers(draw, 99, int((ends - starts).sum()))
    return (states, slots, starts, ends, new, REQUESTS), (slots,)


def last(draw: torch.Generator) -> tuple[Sequence[Any], Sequence[Tensor]]:
    written = torch.zeros(REQUESTS).int()
    lengths = 1 + integers(draw, WIDTH, REQUESTS).int()
    return (integers(draw, 99, REQUESTS, WIDTH).int(), lengths, written, WIDTH, REQUESTS), (written,)


def window(draw: torch.Generator) -> tuple[Sequence[Any], Sequence[Tensor]]:
    return (*table(draw), integers(draw, 30, REQUESTS)), ()


def hosts_window(states: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
    """As ``assign_extend_cache_locs_func`` starts the kernel where SGLang knows the device."""
    found = torch.empty(REQUESTS * WIDTH, dtype=torch.int64)
    ends, upper = starts + WIDTH, next_power_of_2(REQUESTS)
    cache_locs.assign_extend_cache_locs[(REQUESTS,)](states, slots, starts, ends, found, slots.shape[1], upper)
    return found


def our_window(states: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
    return forms.slots_of_window(
        req_pool_indices=states, req_to_token=slots, start_offset=starts, draft_token_num=WIDTH
    )


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Case]] = {
    **{
        f"build_tree {sizes}": (spec_tree.sgl_build_tree_kernel_triton, forms.build_tree, build(*sizes))
        for sizes in ((1, WIDTH - 1, WIDTH), (2, 3, 7), (4, 2, 5), (3, 1, 4))
    },
    "read_chain": (reconstruct_tree.reconstruct_indices_from_tree_mask_triton, forms.read_chain, read),
    "verify_greedy chains": (spec_tree.verify_tree_greedy_triton, forms.verify_greedy, greedy(chain)),
    "verify_greedy trees": (spec_tree.verify_tree_greedy_triton, forms.verify_greedy, greedy(tree)),
    "sample_by_rejection": (
        reject_sampling.chain_speculative_sampling_triton,
        forms.sample_by_rejection,
        rejection,
    ),
    "slots_of_drafts": (cache_locs.assign_draft_cache_locs_contiguous_func, forms.slots_of_drafts, drafts),
    "slots_of_window": (hosts_window, our_window, window),
    "write_slots": (allocation.assign_req_to_token_pool_func, forms.write_slots, write),
    "last_accepted": (eagle.fill_bonus_tokens_func, forms.last_accepted, last),
}


def results(function: Callable[..., Any], case: Case, seed: int) -> list[Tensor]:
    """All that a function returns and writes."""
    arguments, written = case(torch.Generator().manual_seed(seed))
    returned = function(*arguments)
    return [*written, *([returned] if isinstance(returned, Tensor) else [])]


def main(job: dict[str, Any]) -> dict[str, Any]:
    differing, ran = {}, []
    for name, (kernel, form, case) in CASES.items():
        for seed in range(job["seeds"]):
            try:
                pairs = zip(results(kernel, case, seed), results(form, case, seed), strict=True)
                equal = [torch.allclose(one, other, atol=1e-6) for one, other in pairs]
            except Exception as error:
                differing[name] = f"{type(error).__name__}: {error}"
                break
            if not equal or not all(equal):
                differing[name] = f"seed {seed}: {equal}"
        ran.append(name)
    return {"differing": differing, "ran": ran}


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))

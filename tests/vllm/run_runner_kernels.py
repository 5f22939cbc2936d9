"""Run the V2 runner's kernels in Triton's interpreter and in our forms, on the same inputs: python FILE REQUEST ANSWER.

vLLM's own functions launch both, so that a form is called as the installed version calls it. A process of its own,
because vLLM must believe in Triton when it defines the kernels, and because the forms replace them in the process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).parents[1] / "support"))
from interpreting import quicken

sys.path.pop()
quicken()

import torch
import triton
import triton.language as tl
import vllm.triton_utils
from torch import Tensor
from triton.runtime import interpreter

vllm.triton_utils.triton, vllm.triton_utils.tl, vllm.triton_utils.HAS_TRITON = triton, tl, True

from vllm_fl.compat import model_runner
from vllm_fl.runner_kernels import launch, native, table

model_runner.importlib.import_module(model_runner.HOST_AS_DEVICE)

from vllm.v1.worker import mamba_utils
from vllm.v1.worker import utils as worker_utils
from vllm.v1.worker.gpu import block_table, buffer_utils, cp_utils, input_batch
from vllm.v1.worker.gpu.mm import rope
from vllm.v1.worker.gpu.model_states import mamba_hybrid, prompt_embeds
from vllm.v1.worker.gpu.sample import (
    bad_words,
    gumbel,
    logit_bias,
    logprob,
    min_p,
    output,
    penalties,
    prompt_logprob,
    thinking_budget,
    trace_replay,
)
from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as predictors
from vllm.v1.worker.gpu.spec_decode.ngram import speculator as ngram_speculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as separate_drafter
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as dependent_drafter

rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))  # the interpreter has none


def with_bool_mask(access: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Some of the interpreter's masks are integers, which it refuses."""

    def run(*arguments: Any) -> Any:
        arguments[place].data = arguments[place].data.astype(bool)
        return access(*arguments)

    return run


builder = interpreter.InterpreterBuilder
builder.create_masked_load = with_bool_mask(builder.create_masked_load, 2)
builder.create_masked_store = with_bool_mask(builder.create_masked_store, 3)
CPU = torch.device("cpu")
SLOTS, VOCABULARY, LONGEST = 6, 1100, 64
"""States of requests, tokens of the vocabulary (two blocks of most kernels), and the longest sequence."""
DRAFTS = 3
"""The most that a request has."""
Case = Callable[["Draw"], Sequence[Any]]


class Draw:
    """Random inputs, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.index = torch.int64 if seed % 2 else torch.int32

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Integers from ``low`` up to and with ``high``."""
        return torch.randint(low, high + 1, shape, generator=self.generator).to(dtype)

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape, generator=self.generator)

    def states(self, count: int) -> Tensor:
        """Different states of requests."""
        return torch.randperm(SLOTS, generator=self.generator)[:count].to(self.index)

    def starts(self, lengths: Tensor) -> Tensor:
        """The first token of each request, then the end."""
        return torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)))

    def logits(self, rows: int) -> Tensor:
        """Logits, of which some are ruled out, in rows that lie apart."""
        values = self.normal(rows, VOCABULARY + 5)[:, :VOCABULARY]
        values[self.integers(0, 9, rows, VOCABULARY) == 0] = float("-inf")
        return values


def batch(draw: Draw, count: int = 4) -> SimpleNamespace:
    """A batch of requests: some read their prompts, some are at the end of them, one generates."""
    lengths = draw.integers(1, 9, count)
    found = SimpleNamespace(idx=draw.states(count), lengths=lengths, starts=draw.starts(lengths))
    found.all_tokens = draw.integers(0, VOCABULARY - 1, SLOTS, LONGEST)
    found.prefill = draw.integers(1, 30, SLOTS)
    found.computed = draw.integers(0, 30, SLOTS)
    found.seq_lens = found.computed[found.idx.long()] + lengths
    return found


def staged_writes(draw: Draw) -> Sequence[Any]:
    table = buffer_utils.StagedWriteTensor((SLOTS, LONGEST), torch.int32, CPU)
    table.stage_write(2, 3, list(range(20)))
    table.stage_write(4, 0, [7])
    numbers = buffer_utils.StagedWriteTensor(SLOTS, torch.int32, CPU)
    numbers.stage_write_elem(5, 9)
    for one in (table, numbers):
        one.apply_write()
    return table.gpu, numbers.gpu


def tables(draw: Draw) -> Sequence[Any]:
    made = block_table.BlockTables([16, 32], SLOTS, 40, [12, 9], CPU)
    for state in range(SLOTS):
        blocks = tuple(draw.integers(1, 99, n).tolist() for n in (5 + state, 8 - state))
        made.append_block_ids(state, blocks, overwrite=True)
    made.apply_staged_writes()
    for block_rows in made.input_block_tables:
        block_rows.fill_(-3)
    made.slot_mappings.fill_(-5)
    idx, lengths = draw.states(3), draw.integers(1, 10, 3)
    gathered = made.gather_block_tables(idx, 4)
    positions = draw.integers(0, 47, int(lengths.sum()) + 2, dtype=torch.int64)
    idx[1] = -1  # a request that pads the batch
    slots = made.compute_slot_mappings(idx, draw.starts(lengths), positions, 38)
    return [table.gpu for table in made.block_tables], [rows.clone() for rows in gathered], slots[:, :38]


def divided(draw: Draw) -> Sequence[Any]:
    """A cache that ranks divide by two tokens in turn, and one that each rank has whole."""
    found: list[Any] = []
    for rank in range(2):
        made = block_table.BlockTables(
            [16, 32], SLOTS, 40, [12, 9], CPU, cp_size=2, cp_rank=rank, cp_interleave=2, dcp_sharded=[True, False]
        )
        for state in range(SLOTS):
            blocks = tuple(draw.integers(1, 99, n).tolist() for n in (8, 9))
            made.append_block_ids(state, blocks, overwrite=True)
        made.apply_staged_writes()
        idx, lengths = draw.states(3), draw.integers(1, 10, 3)
        positions = draw.integers(0, 99, int(lengths.sum()) + 2, dtype=torch.int64)
        found.append(made.compute_slot_mappings(idx, draw.starts(lengths), positions, 38)[:, :38].clone())
        lengths = draw.integers(1, 99, SLOTS)
        found.append(cp_utils.prepare_dcp_local_seq_lens(draw.integers(0, 9, SLOTS), lengths, 4, 2, rank, 2))
    return found


def prefill_inputs(draw: Draw) -> Sequence[Any]:
    b = batch(draw)
    ids, following = draw.integers(0, 9, 60), draw.integers(0, 9, 2, SLOTS)
    input_batch.prepare_prefill_inputs(ids, following, b.idx, b.starts, b.all_tokens, b.prefill, b.computed)
    return ids, following


def positions_and_lengths(draw: Draw) -> Sequence[Any]:
    b = batch(draw)
    positions, lengths = draw.integers(0, 9, 60, dtype=torch.int64), draw.integers(0, 9, SLOTS)
    input_batch.prepare_pos_seq_lens(b.idx, b.starts, b.computed, positions, lengths)
    return positions, lengths


def sampled_and_drafted(draw: Draw) -> Sequence[Any]:
    found: list[Any] = []
    for drafts, new in ((0, 1), (3, 1), (3, 0)):
        b = batch(draw)
        logits = torch.minimum(draw.integers(1, drafts + new, 4), b.lengths)
        b.prefill[b.idx[0].long()] = b.seq_lens[0] - logits[0]  # its first logit is that of the prompt's end
        ids, last = draw.integers(0, 9, 60), draw.integers(0, 999, SLOTS, 1, dtype=torch.int64)
        drafted = draw.integers(0, 999, SLOTS, drafts, dtype=torch.int64)
        cu, count = draw.starts(logits), int(logits.sum())
        indices = input_batch.combine_sampled_and_draft_tokens(
            ids, b.idx, last, b.starts, b.seq_lens, b.prefill, drafted, cu, count, new
        )
        found += [ids, indices]
    return found


def sampled_and_rejected(draw: Draw) -> Sequence[Any]:
    b, logits = batch(draw), draw.integers(1, 4, 4)
    sampled = torch.minimum(draw.integers(0, 4, 4), logits)
    return input_batch.get_num_sampled_and_rejected(sampled, b.seq_lens, draw.starts(logits), b.idx, b.prefill)


def update(draw: Draw) -> Sequence[Any]:
    found: list[Any] = []
    for with_counts in (True, False):
        b = batch(draw)
        b.idx[2] = -1
        last, total = draw.integers(0, 9, SLOTS, 1, dtype=torch.int64), draw.integers(5, 30, SLOTS)
        counts = draw.integers(0, 2, SLOTS, VOCABULARY) if with_counts else None
        tokens = draw.integers(0, 40, 4, 3, dtype=torch.int64)
        sampled, rejected = draw.integers(0, 3, 4), draw.integers(0, 1, 4)
        starts = b.starts if with_counts else None
        input_batch.post_update(b.idx, b.computed, last, counts, tokens, sampled, rejected, starts, b.all_tokens, total)
        found += [b.computed, last, counts, b.all_tokens, total]
    return [one for one in found if one is not None]


def computed(draw: Draw) -> Sequence[Any]:
    b = batch(draw)
    input_batch.post_update_num_computed_tokens(b.idx, b.computed, b.starts)
    return (b.computed,)


def expanded(draw: Draw) -> Sequence[Any]:
    logits = draw.integers(1, 4, 4)
    return input_batch.expand_idx_mapping(draw.states(4), int(logits.sum()), draw.starts(logits), 4)


def rope_positions(draw: Draw) -> Sequence[Any]:
    state = rope.RopeState(3, SLOTS, 60, LONGEST, CPU)
    state.prefill_positions.gpu.copy_(draw.integers(0, 99, 3 * SLOTS, LONGEST))
    state.prefill_delta.np[:] = draw.integers(-5, 5, SLOTS).numpy()
    state.prefill_delta.copy_to_uva()
    b = batch(draw)
    state.prepare_positions(b.idx, b.starts, b.prefill, b.computed)
    return (state.positions,)


def rows(draw: Draw, count: int = 5) -> tuple[Tensor, Tensor]:
    """Logits and the state of each row's request."""
    return draw.logits(count), draw.integers(0, SLOTS - 1, count)


def temperatures(draw: Draw) -> Sequence[Any]:
    logits, idx = rows(draw)
    gumbel.apply_temperature(logits, idx, torch.tensor([0.0, 1.0, 0.5, 1.7, 0.0, 2.0]))
    return (logits,)


def least_probability(draw: Draw) -> Sequence[Any]:
    logits, idx = rows(draw)
    min_p.apply_min_p(logits, idx, torch.tensor([0.0, 0.1, 0.5, 1.0, 0.0, 0.01]))
    return (logits,)


def biases(draw: Draw) -> Sequence[Any]:
    found = []
    for check in (False, True):
        logits, idx = rows(draw, 6)
        idx = torch.arange(SLOTS, dtype=torch.int32)
        ids = torch.stack([torch.randperm(VOCABULARY, generator=draw.generator)[:8] for _ in range(SLOTS)]).int()
        allowed, stop = ids[:, :4].contiguous(), ids[:, 2:6].contiguous()
        logit_bias.apply_logit_bias(
            logits, idx, draw.integers(0, 9, 6, dtype=torch.int64), torch.tensor([0, 4, 2, 0, 2, 4]).int(), allowed,
            torch.tensor([3, 0, 8, 0, 1, 2]).int(), ids, draw.normal(SLOTS, 8), torch.full((SLOTS,), 6).int(),
            torch.tensor([4, 4, 0, 1, 4, 4]).int(), torch.tensor([0, 1, 1, 0, 0, 1]).bool(), stop, check,
        )  # fmt: skip
        found.append(logits)
    return found


def penalized(draw: Draw) -> Sequence[Any]:
    logits, _ = rows(draw, 6)
    idx = torch.tensor([0, 1, 1, 1, 2, 3]).int()
    places = torch.tensor([0, 0, 1, 2, 0, 0]).int()
    mask = draw.integers(-(1 << 31), (1 << 31) - 1, SLOTS, -(-VOCABULARY // 32))
    penalties.apply_penalties(
        logits, idx, draw.integers(0, 9, 6), places, torch.tensor([1.0, 1.5, 1.0, 0.7, 1.0, 1.0]),
        torch.tensor([0.0, 0.3, 0.0, -0.2, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.1, 0.5, 0.0, 0.0]), mask,
        draw.integers(0, 2, SLOTS, VOCABULARY),
    )  # fmt: skip
    return (logits,)


def counted(draw: Draw) -> Sequence[Any]:
    mask, counts = torch.ones(SLOTS, -(-VOCABULARY // 32)).int(), torch.ones(SLOTS, VOCABULARY).int()
    b = batch(draw)
    b.all_tokens[:, ::7] = 31  # the sign of a word
    prompt = (b.prefill - draw.integers(0, 5, SLOTS)).clamp(min=1)
    penalties.bincount(b.idx, b.all_tokens, prompt, b.prefill, mask, counts, LONGEST)
    return mask, counts


def words(draw: Draw) -> Sequence[Any]:
    logits, idx = draw.logits(6), torch.tensor([0, 1, 1, 1, 2, 3]).int()
    tokens = draw.integers(0, 1, SLOTS, 12)
    offsets = torch.tensor([0, 1, 3, 6, 12]).int().expand(SLOTS, 5).contiguous()
    history, places = draw.integers(0, 1, SLOTS, LONGEST), torch.tensor([0, 0, 1, 2, 0, 0]).int()
    prompt = torch.full((SLOTS,), 4).int()
    bad_words.apply_bad_words(
        logits, idx, tokens, offsets, torch.tensor([4, 4, 0, 2, 0, 0]).int(), history, prompt,
        prompt + draw.integers(0, 9, SLOTS), draw.integers(0, 1, 6), places, 4,
    )  # fmt: skip
    return (logits,)


def chosen(draw: Draw) -> Sequence[Any]:
    found = []
    for apply, drafting, wide in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, False, True),
    ):
        logits, idx = rows(draw, 6)
        idx[3] = -1
        seeds = draw.integers(-(1 << 62), 1 << 62, SLOTS, dtype=torch.int64)
        heat = torch.tensor([0.0, 1.0, 0.5, 1.7, 0.0, 2.0])
        places = draw.integers(0, 1 << 40, 6, dtype=torch.int64)
        found.append(gumbel.gumbel_sample(logits, idx, heat, seeds, places, apply, drafting, use_fp64=wide))
    return found


def greedy(draw: Draw) -> Sequence[Any]:
    """No request has a temperature; a whole block of a row is ruled out, and another row but for its last token."""
    logits, idx = rows(draw, 6)
    idx[3] = -1
    logits[1, 1024:] = float("-inf")
    logits[2, :-1] = float("-inf")
    nothing = torch.zeros(SLOTS)
    return gumbel.gumbel_sample(logits, idx, nothing, nothing.long(), nothing[:6].long(), True, False)


def replayed(draw: Draw) -> Sequence[Any]:
    sampled, idx = draw.integers(0, VOCABULARY - 1, SLOTS, dtype=torch.int64), torch.tensor([5, 0, -1, 3, 1, 2]).int()
    lengths, prompt = torch.tensor([0, 9, 3, 64, 5, 9]).int(), torch.tensor([4, 4, 4, 1, 4, 9]).int()
    total = prompt + torch.tensor([0, 8, 3, 63, 0, -1]).int()  # a trace's last token, one behind it, and before it
    traces = draw.integers(0, VOCABULARY - 1, SLOTS, LONGEST)
    trace_replay.apply_trace_tokens(sampled, idx, traces, lengths, total, prompt)
    return (sampled,)


def likelihoods(draw: Draw) -> Sequence[Any]:
    found: list[Any] = []
    for topk, own in ((0, 0), (4, 0), (3, 5), (5, 2), (0, 4)):
        logits = draw.logits(5)
        sampled = (logits + draw.normal(5, VOCABULARY)).argmax(-1)  # never one that is ruled out
        state = logprob.LogprobTokenIdsState(SLOTS, CPU)
        state.token_ids.gpu[:, :9] = draw.integers(0, VOCABULARY - 1, SLOTS, 9)
        state.num_token_ids.np[:] = [own, 0, own, 0, 1 if own else 0, 0]
        state.num_token_ids.copy_to_uva()
        idx = torch.tensor([0, 1, 2, 3, 4]).int()
        got = logprob.compute_topk_scores(logits, topk, sampled, None, state, idx, own)
        found += [got.logprob_token_ids, got.logprobs, got.selected_token_ranks]
    return found


def prompt_tokens(draw: Draw) -> Sequence[Any]:
    b = batch(draw)
    return (prompt_logprob.get_prompt_logprobs_token_ids(int(b.starts[-1]), b.starts, b.idx, b.computed, b.all_tokens),)


def supports(draw: Draw) -> Sequence[Any]:
    logits = draw.logits(5)
    logits[:, 7:] = torch.where(draw.integers(0, 40, 5, VOCABULARY - 7) > 0, float("-inf"), logits[:, 7:])
    got = output.SamplingMaskTensors.from_logits(
        logits, torch.tensor([0, 2, 3, 5]).int(), torch.tensor([2, 0, 1]).int(), 16, 2
    )
    sampled = torch.tensor([True, True, False, False, True, False])
    kept = torch.arange(got.token_ids.shape[1]) < got.counts.clamp(max=16)[:, None]
    return got.token_ids.masked_fill(~kept, -1), got.packed_mask[sampled], got.counts


def thought(draw: Draw) -> Sequence[Any]:
    """Markers are short and tokens few, so that texts have them."""
    found = []
    for start, natural, end in (([1], [2], [2]), ([1, 0], [2], [0, 2, 1]), ([1], [2, 0], [2, 2])):
        text, total = draw.integers(0, 2, SLOTS, LONGEST), draw.integers(1, LONGEST - 4, SLOTS)
        budgets, logits = draw.integers(-1, 4, SLOTS), draw.logits(6)
        caches = torch.full((SLOTS,), -1).int(), torch.full((SLOTS,), -1).int(), torch.zeros(SLOTS).int()
        markers = [torch.tensor(ids).int() for ids in (start, natural, end)]
        for grown in (0, 3):
            total += grown
            idx, places = torch.tensor([0, 1, 1, 1, 2, 3]).int(), torch.tensor([0, 0, 1, 2, 0, 0]).int()
            thinking_budget.apply_thinking_budget(
                logits,
                torch.arange(4).int(),
                idx,
                budgets,
                text,
                total,
                draw.integers(0, 2, 6),
                places,
                *caches,
                *markers,
            )
            found.append(logits.clone())
    return found


def embedded(draw: Draw) -> Sequence[Any]:
    b, width = batch(draw), 20
    state = prompt_embeds.PromptEmbedsState(SLOTS, width, torch.float32, CPU)
    for place in (0, 2, 3):
        own = draw.normal(int(b.computed[b.idx[place]]) + place * 2, width)
        is_token = draw.integers(0, 1, len(own)).bool() if place else None
        request = SimpleNamespace(req_id=str(place), prompt_embeds=own, prompt_is_token_ids=is_token)
        state.add_request(int(b.idx[place]), request)
    state.apply_staged_writes()
    scheduled = b.lengths.numpy()
    b = SimpleNamespace(
        req_ids=list("0123"), num_reqs=4, idx_mapping=b.idx, query_start_loc=b.starts, num_scheduled_tokens=scheduled,
        computed=b.computed, query_start_loc_np=b.starts.numpy(),
        num_computed_tokens_np=b.computed[b.idx.long()].numpy(),
    )  # fmt: skip
    embeddings = draw.normal(int(b.query_start_loc[-1]), width)
    state.apply(b, b.computed, embeddings)
    return (embeddings,)


def verified(draw: Draw) -> Sequence[Any]:
    """Some drafts are the most likely tokens, some are none; two requests are greedy."""
    found = []
    for with_logits, synthetic, wide in ((False, False, False), (True, False, False), (True, True, True)):
        lengths = draw.integers(1, DRAFTS + 1, 5)
        cu, state = draw.starts(lengths), draw.states(5)
        row = torch.repeat_interleave(torch.arange(5), lengths.long())
        local = (torch.arange(len(row)) - cu[row]).int()
        logits = draw.logits(len(row))
        drafts = draw.logits(SLOTS * DRAFTS)[:, : VOCABULARY - 3].view(SLOTS, DRAFTS, -1)
        tokens = torch.cat((torch.zeros(1).long(), logits[:-1, : VOCABULARY - 3].argmax(-1)))
        tokens = torch.where(draw.integers(0, 2, len(row)) == 0, draw.integers(-1, 90, len(row)), tokens)
        heat = torch.tensor([0.0, 1.0, 0.5, 1.7, 0.0, 2.0])
        seeds = draw.integers(-(1 << 62), 1 << 62, SLOTS, dtype=torch.int64)
        places = draw.integers(0, 1 << 40, len(row), dtype=torch.int64)
        rates = torch.tensor([0.9, 0.5, 0.2]) if synthetic else None
        sampled, count = rejection_sampler_utils.rejection_sample(
            logits, drafts if with_logits else None, tokens, cu, places, state, state[row], local, heat, seeds, DRAFTS,
            rates, use_fp64=wide,
        )  # fmt: skip
        written = torch.arange(DRAFTS + 1) < count[:, None]
        flat = torch.zeros(len(row)).long()
        rejection_sampler._flatten_sampled_kernel[(5,)](flat, sampled, sampled.stride(0), count, cu)
        found += [sampled.masked_fill(~written, -1), count, flat]
    return found


def judged(draw: Draw) -> Sequence[Any]:
    count = 7
    indices, state = torch.randperm(20, generator=draw.generator)[:count], draw.integers(0, SLOTS - 1, count)
    places, prompts = draw.integers(0, 9, 20, dtype=torch.int64), draw.integers(1, 9, SLOTS)
    return rejection_sampler.gather_draft_sampled(
        draw.integers(0, 99, 20), places, indices, state, draw.integers(0, 2, count), prompts
    )


def looked_up(draw: Draw) -> Sequence[Any]:
    found = []
    for least, most in ((1, 3), (2, 2), (2, 5)):
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                prompt_lookup_min=least, prompt_lookup_max=most, num_speculative_tokens=DRAFTS
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
            model_config=SimpleNamespace(max_model_len=LONGEST),
        )
        states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=draw.integers(0, 2, SLOTS, LONGEST)),
            total_len=SimpleNamespace(gpu=draw.integers(1, LONGEST, SLOTS)),
        )
        batch = SimpleNamespace(num_reqs=4, idx_mapping=draw.states(4))
        last = draw.integers(0, 2, SLOTS, 1, dtype=torch.int64)
        made = ngram_speculator.NgramGPUSpeculator(config, CPU, states)
        nothing = dict.fromkeys(
            ("attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_rejected")
        )
        rest = dict.fromkeys(("next_prefill_tokens", "temperature", "seeds"))
        sampled = draw.integers(0, 2, 4)
        found.append(made.propose(batch, num_sampled=sampled, last_sampled=last, **nothing, **rest))
    return found


def drafted_from(draw: Draw) -> tuple[SimpleNamespace, SimpleNamespace, Tensor]:
    """A target's batch, buffers of a drafter, and how many tokens of each request are rejected."""
    b = batch(draw)
    total, starts = int(b.starts[-1]), torch.cat((b.starts, torch.full((2,), 77).int()))
    target = SimpleNamespace(
        num_reqs=4, idx_mapping=b.idx, query_start_loc=starts, query_start_loc_np=starts.numpy(), seq_lens=b.seq_lens,
        input_ids=draw.integers(0, 999, total + 2), num_tokens=total,
    )  # fmt: skip
    target.positions = draw.integers(0, LONGEST - 1, total + 2, dtype=torch.int64)
    buffers = SimpleNamespace(query_start_loc=draw.integers(0, 9, SLOTS + 1), seq_lens=draw.integers(0, LONGEST, SLOTS))
    buffers.input_ids, buffers.positions = (draw.integers(0, LONGEST, 60, dtype=kind) for kind in DRAFTED)
    return target, buffers, torch.minimum(draw.integers(0, 3, 4), b.lengths - 1)


DRAFTED = (torch.int32, torch.int64)


def drafts_begin(draw: Draw) -> Sequence[Any]:
    target, buffers, rejected = drafted_from(draw)
    last, step = draw.integers(0, 9, SLOTS, dtype=torch.int64), torch.tensor(2)
    sampled, following = draw.integers(0, 999, SLOTS, 1, dtype=torch.int64), draw.integers(0, 999, 1, SLOTS)
    count = draw.integers(0, 1, 4)
    dependent_drafter.prepare_prefill_inputs(last, step, buffers, target, count, rejected, sampled, following, SLOTS)
    return [last, step, *vars(buffers).values()]


def drafts_go_on(draw: Draw) -> Sequence[Any]:
    found: list[Any] = []
    for advance, step in ((True, 1), (False, 1), (True, DRAFTS - 1)):
        target, buffers, rejected = drafted_from(draw)
        drafts, places = draw.integers(0, 999, SLOTS, DRAFTS, dtype=torch.int64), draw.integers(0, 9, SLOTS)
        dependent_drafter.prepare_decode_inputs(
            drafts[:4, 0], target.seq_lens, rejected, buffers, places, 40, SLOTS, advance
        )
        found += [places.clone(), *(one.clone() for one in vars(buffers).values())]
        states, following = draw.normal(7, 5), draw.normal(9, 8)[:, :5]
        dependent_drafter.update_draft_inputs(
            draw.integers(0, 999, 4, dtype=torch.int64), torch.tensor(step), states, drafts, following, buffers, places,
            4, 40, DRAFTS, advance,
        )  # fmt: skip
        found += [drafts, following, places, *vars(buffers).values()]
    return found


def drafts_begin_apart(draw: Draw) -> Sequence[Any]:
    target, buffers, rejected = drafted_from(draw)
    last, sampled = draw.integers(0, 9, SLOTS, dtype=torch.int64), draw.integers(0, 999, SLOTS, 1, dtype=torch.int64)
    ids, places = (draw.integers(0, 9, 60, dtype=kind) for kind in DRAFTED)
    separate_drafter.prepare_prefill_inputs(buffers, target, sampled, rejected, ids, places, last, SLOTS, 20)
    return [ids, places, last, buffers.query_start_loc, buffers.seq_lens]


def several_predict(draw: Draw) -> Sequence[Any]:
    """Several predictors draft: tokens and hidden states for the first one, what is kept of them, and the shift."""
    target, buffers, _ = drafted_from(draw)
    lengths = target.query_start_loc[:5].diff()
    rejected = torch.minimum(draw.integers(0, DRAFTS, 4), lengths - 1)
    buffers.query_start_loc[:5] = target.query_start_loc[:5]
    last, kept = draw.integers(0, 9, SLOTS, dtype=torch.int64), DRAFTS - 1
    ids, further = (draw.integers(0, 999, SLOTS, kept, dtype=torch.int64) for _ in range(2))
    sampled, following = draw.integers(0, 999, SLOTS, 1, dtype=torch.int64), draw.integers(0, 999, DRAFTS, SLOTS)
    count = draw.integers(0, 1, 4)
    predictors.prepare_input_buffers(
        4, target, ids, count, rejected, sampled, following, further, buffers, last, SLOTS, DRAFTS
    )
    found = [last.clone(), further.clone(), *(one.clone() for one in vars(buffers).values())]
    states, targets, old = draw.normal(60, 8), draw.normal(60, 8), draw.normal(SLOTS, kept, 8)
    embeds, old_embeds = draw.normal(60, 8), draw.normal(SLOTS, kept, 8)
    predictors.prepare_input_hidden_states_and_embeddings(
        4, int(lengths.max()), states, targets, old, embeds, old_embeds, target, buffers, rejected, DRAFTS
    )
    slots = draw.integers(0, 99, 2, 60, dtype=torch.int64)
    predictors.pad_trailing_draft_slots(slots, buffers.query_start_loc, last[:4], 4)
    found += [states.clone(), embeds.clone(), slots]
    idx = target.idx_mapping.clone()
    idx[1] = -1  # a request that pads the batch
    predictors.cache_inputs(buffers, embeds, states, ids, old_embeds, old, last[:4], idx, 4, DRAFTS, True)
    drafts, added = draw.integers(0, 999, 4, dtype=torch.int64), draw.normal(4, 8)
    predictors.update_draft_inputs(drafts, added, buffers, embeds, last[:4], idx, 4)
    return [*found, ids, old, old_embeds, embeds, buffers.input_ids]


def drafts_kept(draw: Draw) -> Sequence[Any]:
    """Drafts are drawn, and their logits kept for the verification: in one column, or one for each row."""
    found = []
    for column in (torch.tensor(1), torch.tensor([2, 0, 1, 0, 2])):
        logits, idx = draw.logits(5).contiguous(), torch.tensor([3, 0, -1, 5, 1]).int()
        kept = torch.full((SLOTS, DRAFTS, VOCABULARY + 2), -7.0)
        seeds = draw.integers(-(1 << 62), 1 << 62, SLOTS, dtype=torch.int64)
        heat, places = torch.tensor([0.0, 1.0, 0.5, 1.7, 0.0, 2.0]), draw.integers(0, 1 << 40, 5, dtype=torch.int64)
        tokens = gumbel.gumbel_sample(logits, idx, heat, seeds, places, True, True, kept, column)
        found += [tokens, kept]
    return found


def accepted(draw: Draw) -> Sequence[Any]:
    state = mamba_hybrid.MambaHybridModelState.__new__(mamba_hybrid.MambaHybridModelState)
    state.recoverssm, state._align_mode = None, False
    state.num_accepted_tokens_gpu = draw.integers(1, 9, SLOTS)
    idx = draw.states(4)
    idx[2] = -1  # a request that pads the batch
    state.postprocess_state(idx, draw.integers(0, 3, 4))
    found = state.num_accepted_tokens_gpu.clone()
    state.postprocess_state(draw.states(3), 0)
    return found, state.num_accepted_tokens_gpu


COLUMNS, PAGE = 9, 16
"""Blocks that a request may have, and tokens of each."""


def moved_states(draw: Draw, channels_first: bool) -> tuple[Any, list[Tensor], Tensor]:
    """vLLM's context for moving states, the states of two layers, and the requests of a batch.

    Each layer has a convolution's inputs and another state, behind each other in a page with a gap.
    """
    tables = [torch.empty(SLOTS, COLUMNS, dtype=torch.int32) for _ in range(2)]
    for blocks in tables:  # every block belongs to one request
        blocks.view(-1)[:] = torch.randperm(SLOTS * COLUMNS, generator=draw.generator).to(torch.int32)
    pages = [draw.normal(SLOTS * COLUMNS, 200) for _ in range(2)]
    shape = (12, 5) if channels_first else (5, 12)
    states = [
        part for page in pages for part in (page[:, :60].unflatten(1, shape), page[:, 60:180].unflatten(1, (4, 5, 6)))
    ]
    windows, inner = [5, 0, 5, 0], [1 if channels_first else 12, 120, 1 if channels_first else 12, 120]
    rows = [12, 0, 12, 0] if channels_first else [0] * 4
    context = mamba_utils.MambaSpecDecodeGPUContext(
        state_base_addrs=torch.tensor([state.data_ptr() for state in states]),
        state_block_strides=torch.tensor([state.stride(0) * 4 for state in states]),
        state_elem_sizes=torch.full((4,), 4, dtype=torch.int32),
        state_inner_sizes=torch.tensor(inner),
        state_conv_widths=torch.tensor(windows, dtype=torch.int32),
        state_group_indices=torch.tensor([0, 0, 1, 1], dtype=torch.int32),
        state_dim_row_count=torch.tensor(rows, dtype=torch.int32),
        state_dim_row_stride=torch.tensor([20 if count else 0 for count in rows]),
        block_size=PAGE, num_states=4, mamba_group_ids=[0, 1], num_groups=2,
        num_accepted_tokens_out=torch.zeros(SLOTS, dtype=torch.int32),
        block_table_ptrs=torch.tensor([blocks.data_ptr() for blocks in tables]),
        aligned_index_block_table_ptrs=torch.zeros(2, dtype=torch.int64),
        block_table_stride_req=COLUMNS, is_initialized=True,
    )  # fmt: skip
    context.kept = tables
    idx = draw.states(4)
    idx[1] = -1
    return context, pages, idx


def states_go_on(draw: Draw) -> Sequence[Any]:
    """States move to the block of the next tokens; some requests are new, some stay in their block."""
    found: list[Any] = []
    for channels_first in (False, True):
        mamba_utils.is_conv_state_dim_first = lambda first=channels_first: first
        context, pages, idx = moved_states(draw, channels_first)
        computed, accepted = draw.integers(0, 90, SLOTS), draw.integers(1, 3, SLOTS)
        columns = (computed - 1).div(PAGE, rounding_mode="floor").to(torch.int32)
        columns[int(idx[0])] = -1
        sources, offsets = (torch.full((SLOTS,), -7, dtype=torch.int32) for _ in range(2))
        real = idx[idx >= 0]
        mamba_utils.preprocess_mamba_align_fused_kernel[(1,)](
            real, columns, computed, draw.starts(draw.integers(1, 30, len(real))), accepted, sources, offsets,
            len(real), BLOCK_SIZE=256, MAMBA_BLOCK_SIZE=PAGE,
        )  # fmt: skip
        found += [columns.clone(), accepted.clone(), sources.clone(), offsets.clone()]
        untouched = torch.ones(SLOTS, dtype=torch.bool)
        untouched[real.long()] = False
        sources[untouched], offsets[untouched] = -1, 0
        context.run_fused_precopy(len(idx), columns, sources, offsets, idx)
        found += [page.clone() for page in pages]
        context.run_fused_precopy(SLOTS, columns, sources, torch.zeros_like(offsets), None)
        found += pages
    return found


def states_are_kept(draw: Draw) -> Sequence[Any]:
    """Accepted drafts end a block, so the state at its end is kept; with and without the count that follows."""
    found: list[Any] = []
    for channels_first in (False, True):
        mamba_utils.is_conv_state_dim_first = lambda first=channels_first: first
        context, pages, idx = moved_states(draw, channels_first)
        accepted, computed = draw.integers(1, 4, SLOTS), draw.integers(5, 90, SLOTS)
        columns = (computed - 1).div(PAGE, rounding_mode="floor").to(torch.int32)
        before = accepted.clone()
        context.run_fused_postprocess_align(len(idx), accepted, columns, computed, idx)
        found += [accepted, *(page.clone() for page in pages)]
        scheduled = draw.integers(4, 8, SLOTS)
        context.run_fused_postprocess(
            SLOTS, before, columns, scheduled, computed - scheduled, draw.integers(0, 3, SLOTS)
        )
        found += [context.num_accepted_tokens_out[:SLOTS], *pages]
    return found


def cleared_blocks(draw: Draw) -> Sequence[Any]:
    """Two layers, whose blocks lie apart, and are of different sizes."""
    first, second = draw.normal(8, 70), draw.normal(8, 2100)
    zeroer = worker_utils.KVBlockZeroer.__new__(worker_utils.KVBlockZeroer)
    zeroer.device = CPU
    addresses = torch.tensor([first.data_ptr(), second.data_ptr() + 80], dtype=torch.uint64)
    zeroer._meta = (addresses, torch.tensor([70, 2100]), torch.tensor([50, 2000]), 2, 1024, 2)
    zeroer.zero_block_ids([2, 7, 3])
    return first, second


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        staged_writes, tables, divided, prefill_inputs, positions_and_lengths, sampled_and_drafted,
        sampled_and_rejected, update,
        computed, expanded, rope_positions, temperatures, least_probability, biases, penalized, counted, words,
        chosen, greedy, replayed, likelihoods, prompt_tokens, supports, verified, judged,
        looked_up, thought, embedded, drafts_begin, drafts_go_on, drafts_begin_apart, several_predict, drafts_kept,
        accepted, states_go_on, states_are_kept, cleared_blocks,
    )
}  # fmt: skip


def main(request: Path, answer: Path) -> None:
    """Write what differs, which forms ran, and the answers of each function in C++."""
    asked = json.loads(request.read_text())
    cases = asked.get("cases", list(CASES))
    draws = [(name, seed) for name in cases for seed in range(asked["seeds"])]
    by_kernel = {draw: CASES[draw[0]](Draw(draw[1])) for draw in draws}
    ran: set[str] = set()
    answers: dict[str, set[bool]] = {}
    native._run = _noting_answers(native._run, answers)
    module = native if asked["native"] else launch
    module.launched = _noting(module.launched, ran)
    table.register(main_memory=asked["native"])
    differing: dict[str, str] = dict.fromkeys(cases, "")
    for draw in draws:
        try:
            torch.testing.assert_close(CASES[draw[0]](Draw(draw[1])), by_kernel[draw], rtol=2e-6, atol=2e-6)
        except AssertionError as error:
            differing[draw[0]] = f"seed {draw[1]}: {error}"
    by_function = {name: sorted(found) for name, found in answers.items()}
    answer.write_text(json.dumps({"differing": differing, "ran": sorted(ran), "native": by_function}))


def _noting(launched: Callable[..., Any], ran: set[str]) -> Callable[..., Any]:
    def noting(form: Callable[..., None], names: Sequence[str]) -> Callable[..., None]:
        launch, name = launched(form, names), next(name for name, each in table.FORMS.items() if each is form)

        def run(*args: Any, **kwargs: Any) -> None:
            ran.add(name)
            launch(*args, **kwargs)

        return run

    return noting


def _noting_answers(call: Callable[..., bool], answers: dict[str, set[bool]]) -> Callable[..., bool]:
    def run(name: str, *arguments: Any) -> bool:
        answer = call(name, *arguments)
        answers.setdefault(name, set()).add(answer)
        return answer

    return run


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""What a request with wrong keys stored leaves SGLang's radix cache, however that request ends."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_fl.worker import damage

PROMPT, READ = 12, 8
"""Tokens of a prompt, and those that have been read."""
WHY = "'linear' by 'vendor.x'"


class Cache:
    """A scheduler's memory, all by SGLang's classes."""

    def __init__(self) -> None:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self.rows = ReqToTokenPool(4, 64, "cpu", False)
        self.slots = TokenToKVPoolAllocator(64, torch.float32, "cpu", None, False)  # type: ignore[arg-type]
        self.tree = RadixCache(CacheInitParams(False, self.rows, self.slots, 1))

    def request(self, name: str) -> Any:
        """A request that has read a part of its prompt, which is in the radix cache."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.common import checkpoint_kv_cache
        from sglang.srt.sampling.sampling_params import SamplingParams

        one = Req(name, "", array("q", range(PROMPT)), SamplingParams(max_new_tokens=4))
        one.refresh_fill_ids()
        self.rows.alloc([one])
        self.rows.write((one.kv.req_pool_idx, slice(0, READ)), self.slots.alloc(READ).int())
        one.extend_end = one.kv.kv_committed_len = one.kv.kv_allocated_len = READ
        checkpoint_kv_cache(one, self.tree)
        return one


@pytest.fixture
def cache(scheduler: None) -> Cache:
    return Cache()


def around(cache: Cache, *running: Any, chunked: Any = None) -> tuple[Any, damage.Damage]:
    """A scheduler that runs requests, and its state, which has just found an implementation that was wrong."""
    made: Any = SimpleNamespace(
        chunked_req=chunked, running_batch=SimpleNamespace(reqs=list(running)), result_queue=[], tree_cache=cache.tree
    )
    damage.DAMAGE.give(made, state := damage.Damage())
    state.verdicts.action = "end"
    state.wrong = SimpleNamespace(new=iter([(WHY,)]).__next__, kept=tuple)  # type: ignore[assignment]
    return made, state


def step(scheduler: Any, *requests: Any, finish: Any = lambda *_: None) -> None:
    """Process a step that decoded requests; implementations are right from the second one on."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch: Any = SimpleNamespace(reqs=list(requests), forward_mode=ForwardMode.DECODE)
    damage.process_batch_result(finish, scheduler, batch, SimpleNamespace())
    damage.DAMAGE.of(scheduler).wrong.new = tuple  # type: ignore[method-assign]


@pytest.mark.parametrize("in_batch", [True, False], ids=["its step is under way", "its step is over"])
def test_the_client_leaves_while_the_prompt_is_read(in_batch: bool, cache: Cache) -> None:
    from sglang.srt.disaggregation.utils import prepare_abort
    from sglang.srt.mem_cache.common import release_kv_cache

    one = cache.request("one")
    scheduler, state = around(cache, chunked=one)
    one.inflight_middle_chunks = 1
    step(scheduler, one)
    assert cache.tree.total_size() == READ  # the request holds it
    scheduler.chunked_req = None  # as SGLang's scheduler ends a chunked request
    prepare_abort(one, "Aborted")
    release_kv_cache(one, cache.tree, checkpoint=False)
    purges = state.purges
    step(scheduler, *([one] if in_batch else []))
    assert cache.tree.total_size() == 0
    assert state.purges > purges  # so that requests which waited meanwhile find nothing either
    assert not state.suspects
    assert not state.ended


def test_the_client_leaves_just_before_the_implementation_is_banned(cache: Cache) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.mem_cache.common import release_kv_cache

    one = cache.request("one")
    scheduler, state = around(cache, one)
    one.to_finish = FINISH_ABORT()

    def finish(*_: Any) -> None:
        one.update_finish_state(0)
        release_kv_cache(one, cache.tree, checkpoint=True)

    step(scheduler)
    assert state.ended == [one]
    step(scheduler, one, finish=finish)
    assert one.finished()
    assert cache.tree.total_size() == 0
    assert not state.ended


def test_a_request_that_ends_and_is_retracted_first_does_not_empty_the_cache_for_good(cache: Cache) -> None:
    from sglang.srt.managers.schedule_batch import retract_all

    one = cache.request("one")
    scheduler, state = around(cache, one)
    step(scheduler)
    assert state.ended == [one]
    assert WHY in one.to_finish.message
    scheduler.running_batch.reqs.clear()
    retract_all(
        reqs=[one],
        req_to_token_pool=cache.rows,
        token_to_kv_pool_allocator=cache.slots,
        tree_cache=cache.tree,
        hisparse_coordinator=None,
    )
    step(scheduler)
    assert cache.tree.total_size() == 0
    assert not state.ended  # though nobody finishes it if its client leaves now

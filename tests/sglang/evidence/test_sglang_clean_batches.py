"""SGLang's requests are not read one by one while none of a batch is damaged or read again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_fl.worker import damage


class Read(Exception):
    """Somebody reads the requests of a batch."""


class Requests:
    """The requests of a batch that must not be read."""

    def __iter__(self) -> Iterator[Any]:
        raise Read


def result(*rows: list[int]) -> Any:
    """What a batch of several steps leaves, with the damaged rows of each."""
    output = SimpleNamespace()
    damage.DAMAGED.give(output, tuple(damage.Damaged(torch.tensor(each)) for each in rows))
    return SimpleNamespace(logits_output=output)


@pytest.mark.parametrize("rows", [[[0, 0]], [[0, 0], [0, 0]]], ids=["one step", "two steps"])
def test_a_clean_batch_is_not_read_request_by_request(rows: list[list[int]]) -> None:
    scheduler: Any = SimpleNamespace()
    batch: Any = SimpleNamespace(reqs=Requests())
    clean = result(*rows)
    for _ in range(2):  # the first one gives the scheduler its state
        assert damage.run_batch(lambda *_: clean, scheduler, batch) is clean
        assert damage.process_batch_result(lambda *_: "answers", scheduler, batch, clean) == "answers"
    with pytest.raises(Read):
        damage.process_batch_result(lambda *_: None, scheduler, batch, result([0, 1]))
    damage.DAMAGE.of(scheduler).verdicts.watched.add("r")
    with pytest.raises(Read):
        damage.run_batch(lambda *_: clean, scheduler, batch)
    with pytest.raises(Read):
        damage.process_batch_result(lambda *_: None, scheduler, batch, clean)


def test_origins_of_requests_that_ended_are_not_those_of_the_next_damage() -> None:
    state = damage.Damage()
    state.add([])
    assert state.judge(None, SimpleNamespace(reqs=Requests()), [0, 0], False) == []  # type: ignore[arg-type]
    assert state.origins is None

"""SGLang's requests are not read one by one while none of a batch is damaged, read again or to be named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_fl.worker import damage


class Read(Exception):
    """Somebody reads the requests of a batch."""


@dataclass(frozen=True)
class Request:
    rid: str


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
    state.origins = {"ended": []}
    assert state.judge(None, SimpleNamespace(reqs=Requests()), [0, 0], False) == []  # type: ignore[arg-type]
    assert state.origins == {}


def test_requests_of_an_implementation_that_differed_and_stays_are_named_once_and_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = Request("one"), Request("other")
    scheduler: Any = SimpleNamespace(
        chunked_req=other, running_batch=SimpleNamespace(reqs=[one]), result_queue=[(SimpleNamespace(reqs=[one]), None)]
    )
    damage.DAMAGE.give(scheduler, state := damage.Damage())
    state.wrong = SimpleNamespace(new=tuple, kept=iter([("'linear' by 'vendor.x'",), ()]).__next__)  # type: ignore[assignment]
    batch: Any = SimpleNamespace(reqs=[one])
    for _ in range(2):
        assert damage.process_batch_result(lambda *_: "answers", scheduler, batch, result([0])) == "answers"
    assert caplog.text.count("of 'linear' by 'vendor.x', which differed and stays in service: one, other;") == 1

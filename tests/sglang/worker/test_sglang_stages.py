"""Stages of a pipeline learn from each other which requests of a step are damaged, and where that began."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from fl_dispatch.shadow.origin import Origin
from sglang_fl.worker import damage

FIRST, SECOND = (Origin("rms_norm", "vendor.wrong", f"model.layers.{layer}.input_layernorm") for layer in (0, 2))


def stage(*origins: Origin) -> Any:
    """A stage's scheduler that reads request ``r`` again."""
    scheduler, state = SimpleNamespace(), damage.Damage()
    state.verdicts.watched.add("r")
    state.add(("r", origin) for origin in origins)
    damage.DAMAGE.give(scheduler, state)
    return scheduler


def test_each_stage_gets_the_rows_and_the_origins_of_the_last_one() -> None:
    first, last, result = stage(FIRST), stage(FIRST, SECOND), SimpleNamespace(logits_output=SimpleNamespace())
    damage.DAMAGED.give(result.logits_output, (damage.Damaged(torch.tensor([0, 1])),))
    damage.WATCHED.give(result, True)
    sent = damage.to_other_stages(lambda *_: {"next_token_ids": 1}, last, result, None)
    got = SimpleNamespace(logits_output=None)
    damage.from_last_stage(lambda *_: got, first, None, None, SimpleNamespace(tensors=sent))
    assert damage._rows(got) == [0, 1]
    assert damage.WATCHED.find(got)
    assert damage.DAMAGE.of(first).origins == {"r": [FIRST, SECOND]}


@pytest.mark.parametrize(
    ("request_id", "mode", "watched"),
    [("s", "EXTEND", False), ("r", "EXTEND", True), ("r", "DECODE", False), ("r", "TARGET_VERIFY", False)],
)
def test_a_stage_hands_on_origins_of_a_prompt_and_none_reaches_its_model(
    request_id: str, mode: str, watched: bool, scheduler: None
) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(reqs=[SimpleNamespace(rid=request_id)], forward_mode=ForwardMode[mode], extend_lens=[3])
    here = stage()
    given = SimpleNamespace(tensors={"hidden_states": 1, damage.ORIGINS: [("r", FIRST)]})

    def run(scheduler: Any, batch: Any, proxies: Any) -> Any:
        assert proxies.tensors == {"hidden_states": 1}
        return SimpleNamespace(pp_hidden_states_proxy_tensors=SimpleNamespace(tensors={}))

    result = damage.run_batch(run, here, batch, given)
    handed_on = {damage.ORIGINS: [("r", FIRST)]} if watched else {}
    assert result.pp_hidden_states_proxy_tensors.tensors == handed_on

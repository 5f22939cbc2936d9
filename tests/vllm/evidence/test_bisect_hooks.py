"""The processor that forces tokens serves either of vLLM's model runners, by the interface of each."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor as ForV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ForV2

from fl_dispatch.cli.bisect.engine_hooks import FORCED, ForcedTokens
from vllm import SamplingParams
from vllm_fl.compat.model_runner import _is_for_v1

NAME = "fl_dispatch.cli.bisect.engine_hooks:ForcedTokens"
FORCING = SamplingParams(extra_args={FORCED: [5, 6]})


@pytest.mark.parametrize("interface", [ForV1, ForV2])
def test_each_runner_finds_its_interface(interface: type) -> None:
    assert issubclass(ForcedTokens, interface)


def test_it_does_not_decide_which_runner_runs() -> None:
    assert not _is_for_v1(NAME)


def test_v1_gets_one_that_chooses_a_request_s_tokens_one_a_step() -> None:
    processor = ForcedTokens(SimpleNamespace(), torch.device("cpu"), False)
    assert isinstance(processor, ForV1)
    assert not isinstance(processor, ForV2)
    force = processor.new_req_logits_processor(FORCING)
    assert force is not None
    assert [int(force([1] * step, torch.randn(9)).argmax()) for step in range(3)] == [5, 6, 6]
    assert processor.new_req_logits_processor(SamplingParams()) is None


def test_v2_gets_one_that_chooses_by_slot_and_position_and_leaves_other_rows_alone() -> None:
    lengths = SimpleNamespace(np=np.array([4, 7, 2]))
    processor = ForcedTokens(SimpleNamespace(), SimpleNamespace(prompt_len=lengths))
    assert isinstance(processor, ForV2)
    assert not isinstance(processor, ForV1)
    assert processor.add_request(1, FORCING)
    assert not processor.add_request(2, SamplingParams())
    logits = torch.randn(3, 9)
    before = logits.clone()
    rows = SimpleNamespace(expanded_idx_mapping=torch.tensor([2, 1, 1]), pos=torch.tensor([1, 6, 7]))
    assert processor.apply(logits, rows)[1:].argmax(-1).tolist() == [5, 6]
    assert torch.equal(logits[0], before[0])
    reading = SimpleNamespace(expanded_idx_mapping=torch.tensor([1]), pos=torch.tensor([2]))  # within its prompt
    assert processor.apply(before[:1].clone(), reading).argmax(-1).tolist() == [5]
    assert not processor.add_request(1, SamplingParams())  # the slot has a new occupant
    assert torch.equal(processor.apply(before.clone(), rows), before)

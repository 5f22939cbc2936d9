"""A server on a GPU whose request has NaN in its logits goes on with the others, eagerly and from captured graphs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from damaged import ends_alone
from engines import expected_tokens
from served import Server

from fl_dispatch.cli.checkpoints import build_checkpoint
from fl_dispatch.hosting.damage.rows import HostMarks
from poison import variables
from vllm_fl.damage.one_pass import OnePass

pytestmark = pytest.mark.gpu
SHARE = ("--gpu-memory-utilization", "0.1")
WAYS = {"eager, V1": ("0",), "eager, V2": ("1",), "graphs, V2": ("1", "--no-enforce-eager")}


@pytest.mark.parametrize("way", WAYS)
def test_a_request_with_nan_ends_alone_with_its_origin_and_nothing_of_it_stays(way: str, tmp_path: Path) -> None:
    model = build_checkpoint("qwen3", tmp_path / "qwen3")
    v2, *options = WAYS[way]
    given = variables(model, tmp_path, VLLM_USE_V2_MODEL_RUNNER=v2)
    server = Server(model, tmp_path / "log.txt", tempfile.mkdtemp(prefix="fl-state-"), given, (*SHARE, *options))
    try:
        ends_alone(server, expected_tokens(model))
    finally:
        server.end()


@pytest.mark.parametrize(("width", "stride"), [(128_256, 128_256), (50_257, 50_304), (50_257, 50_257)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_chosen_with_the_check_are_vllms_and_damaged_rows_are_marked(
    dtype: torch.dtype, width: int, stride: int
) -> None:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    rows, device = 8, torch.device("cuda")
    torch.manual_seed(0)
    heat = torch.tensor([0.0, 1.0] * 4, device=device)
    seeds = torch.randint(1 << 62, (rows,), device=device)
    states = SimpleNamespace(temperature=SimpleNamespace(gpu=heat), seeds=SimpleNamespace(gpu=seeds))
    sampler = SimpleNamespace(needs_logits_processing=None, sampling_states=states)
    both, memory = OnePass(sampler, rows, width, device), HostMarks(rows)
    for step in range(50):
        count = rows - step % 3
        logits = torch.randn(count, stride, device=device).to(dtype)[:, :width]
        logits[0, [5, 9000, width - 1]] = 50.0  # the first of equals
        logits[1, 7:] = float("-inf")
        requests = torch.randperm(rows, device=device)[:count].int()
        positions = torch.randint(1 << 30, (count,), device=device)
        expected = gumbel_sample(logits, requests, heat, seeds, positions, False, False)
        damaged = 2 + step % 8  # some numbers are of no row
        if damaged < count:
            logits[damaged, step * 1000] = (float("nan"), float("inf"))[step % 2]
        before, slot = logits.clone(), memory.slot_of(count)
        assert slot is not None
        tokens = both.choose(logits, requests, positions, slot)
        assert tokens is not None
        torch.cuda.synchronize()
        faults = [row == damaged for row in range(count)]
        healthy = ~torch.tensor(faults)
        assert slot.damaged() == [int(fault) for fault in faults]
        assert slot.found() == any(faults)
        assert torch.equal(tokens.cpu()[healthy], expected.cpu()[healthy])
        assert torch.equal(logits.cpu()[healthy], before.cpu()[healthy])
        assert not tokens.cpu()[~healthy].any()
        assert not logits.cpu()[~healthy].any()
    assert not both.fails
    assert len(both._launches) == 1, "steps of one layout are launched the short way"

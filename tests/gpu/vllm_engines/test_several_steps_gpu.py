"""Several steps for one scheduling on a GPU: in whole graphs, in pieces and eagerly, while requests come and go."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import Runs, start_features
from several import ASKED, MOST, NEW, Compared, alike, engines, whole

import variants
from fl_dispatch.cli.checkpoints import build_checkpoint
from vllm_fl.compat import versions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(versions.host_version() == "0.32", reason="vLLM 0.32 makes single steps"),
]
COMMON = {"gpu_memory_utilization": 0.1, "enforce_eager": False}
MODES = ("FULL_AND_PIECEWISE", "PIECEWISE", "NONE")
ENGINES = 2
"""For each mode."""
each = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """All engines with one step for each scheduling, and with several, each in a process of its own."""
    folder = tmp_path_factory.mktemp("several")
    model = variants.with_characters(build_checkpoint("qwen3", folder / "plain"), folder / "qwen3")
    adapter = variants.adapter(model, folder / "adapter", 1)
    runs = []
    for mode in MODES:
        graphs = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4]}
        runs += engines(model, adapter, **COMMON, compilation_config=graphs)
    return Compared(
        Runs(
            {
                name: start_features(*runs, VLLM_FL_STEPS=str(most), VLLM_USE_V2_MODEL_RUNNER="1")
                for name, most in (("one", 1), ("several", MOST))
            }
        )
    )


@each
@pytest.mark.parametrize("subject", ASKED)
def test_requests_get_what_single_steps_give_them(subject: str, mode: str, compared: Compared) -> None:
    assert alike(*compared.steps(ENGINES * MODES.index(mode), list(ASKED).index(subject)))


@each
def test_schedulings_made_several_steps(mode: str, compared: Compared) -> None:
    first = ENGINES * MODES.index(mode)
    assert all(made[str(MOST)] > 0 for run in (first, first + 1) for made in compared.made(run))
    assert compared.runs["one"]["runs"][first]["report"]["steps"] is None


@each
def test_a_stream_has_the_same_tokens_in_fewer_pieces(mode: str, compared: Compared) -> None:
    one, several = compared.steps(ENGINES * MODES.index(mode), len(ASKED) + 1)
    assert whole(several) == whole(one)
    assert sum(map(len, several)) < sum(map(len, one))


@each
def test_requests_arrive_and_are_aborted_between_schedulings(mode: str, compared: Compared) -> None:
    one, several = (each["tokens"] for each in compared.steps(ENGINES * MODES.index(mode), len(ASKED)))
    assert all(several[name] == one[name] for name in one if name != "request-1")
    assert len(several["request-1"]) <= NEW


@each
def test_adapters_and_metrics_are_as_with_single_steps(mode: str, compared: Compared) -> None:
    first = ENGINES * MODES.index(mode)
    assert alike(*compared.steps(first, len(ASKED) + 4))
    assert compared.steps(first, len(ASKED) + 3)[1] == {}


@each
def test_preempted_requests_get_the_tokens_of_single_steps(mode: str, compared: Compared) -> None:
    one, several = compared.steps(ENGINES * MODES.index(mode) + 1, 0)
    assert [output["tokens"] for output in several] == [output["tokens"] for output in one]

"""Several steps per scheduler call on a GPU: in whole graphs, in pieces and eagerly, while requests come and go."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import Runs, start_features
from several import ASKED, MOST, NEW, VARIABLES, Compared, alike, engines, whole

import variants
from fl_dispatch.cli.checkpoints import build_checkpoint
from vllm_fl.compat import versions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(versions.host_version() == "0.32", reason="vLLM 0.32 makes single steps"),
]
COMMON = {"gpu_memory_utilization": 0.1, "enforce_eager": False}


@pytest.fixture(scope="module", params=["FULL_AND_PIECEWISE", "PIECEWISE", "NONE"])
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Engines with one step per scheduler call, and with several, for a mode of graphs."""
    folder = tmp_path_factory.mktemp("several")
    model = variants.with_characters(build_checkpoint("qwen3", folder / "plain"), folder / "qwen3")
    graphs = {"cudagraph_mode": request.param, "cudagraph_capture_sizes": [1, 2, 4]}
    runs = engines(model, variants.adapter(model, folder / "adapter", 1), **COMMON, compilation_config=graphs)
    steps = {"one": 1, "several": MOST}
    return Compared(
        Runs({name: start_features(*runs, VLLM_FL_STEPS=str(most), **VARIABLES) for name, most in steps.items()})
    )


@pytest.mark.parametrize("subject", ASKED)
def test_requests_get_what_single_steps_give_them(subject: str, compared: Compared) -> None:
    assert alike(*compared.named(subject))


def test_schedulings_made_several_steps(compared: Compared) -> None:
    assert all(made[str(MOST)] > 0 for run in (0, 1) for made in compared.made(run))
    assert compared.runs["one"]["runs"][0]["report"]["steps"] is None


def test_a_stream_has_the_same_tokens_in_fewer_pieces(compared: Compared) -> None:
    one, several = compared.steps(0, len(ASKED) + 1)
    assert whole(several) == whole(one)
    assert sum(map(len, several)) < sum(map(len, one))


def test_requests_arrive_and_are_aborted_between_schedulings(compared: Compared) -> None:
    one, several = (each["tokens"] for each in compared.steps(0, len(ASKED)))
    assert all(several[name] == one[name] for name in one if name != "request-1")
    assert len(several["request-1"]) <= NEW


def test_adapters_and_metrics_are_as_with_single_steps(compared: Compared) -> None:
    assert alike(*compared.steps(0, len(ASKED) + 4))
    assert compared.steps(0, len(ASKED) + 3)[1] == {}


def test_preempted_requests_get_the_tokens_of_single_steps(compared: Compared) -> None:
    one, several = compared.steps(1, 0)
    assert [output["tokens"] for output in several] == [output["tokens"] for output in one]

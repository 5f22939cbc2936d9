"""FlagCX's collectives on the emulated NPU, through a stand-in for the library that waits for the device's stream.

The stand-in asks the device's runtime, so it notices a handle that is no stream. It cannot notice a stream that is
another one than the work's, because the emulated chip works when it is asked; so the handle itself is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ctypes import addressof, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fl_dispatch.cli.checkpoints import VOCABULARY, build_checkpoint
from fl_dispatch.hosting.ranks import flagcx
from flagcx_on_npu import check_fault, check_ranks, check_tokens, steps, variables
from half_on_npu import SIZES
from processes import finish

SCRIPT = Path(__file__).with_name("run_npu_vllm.py")
MANY, TYPE = 3, flagcx.DTYPES[torch.float32]


@pytest.fixture
def collectives(standin: Callable[..., Path], tmp_path: Path) -> Iterator[flagcx.FlagCXCollectives]:
    """Those of a group of one rank."""
    library = flagcx.load(standin("ASCEND"), "npu")
    library.standinLastStream.restype = c_void_p
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    connected = flagcx.connect(library, dist.group.WORLD, "npu")
    yield connected
    connected.close()
    dist.destroy_process_group()


def test_the_library_gets_the_stream_that_is_current(collectives: flagcx.FlagCXCollectives) -> None:
    tensor = torch.ones(MANY, device="npu")
    for stream in (torch.npu.default_stream(), torch.npu.Stream(), torch.npu.Stream()):
        with torch.npu.stream(stream):
            collectives.all_reduce(tensor)
        assert collectives._library.standinLastStream() == stream.npu_stream
    assert tensor.tolist() == [1.0] * MANY


@pytest.mark.parametrize("way", ["no stream", "the runtime's own handle", "a handle of nothing"])
def test_the_stand_in_refuses_what_is_no_stream_of_flagcx(way: str, collectives: flagcx.FlagCXCollectives) -> None:
    tensor = torch.ones(MANY, device="npu")
    memory, communicator, nothing = tensor.data_ptr(), collectives._communicator, flagcx._Stream(tensor.data_ptr())
    stream = {
        "no stream": None,
        "the runtime's own handle": torch.npu.current_stream().npu_stream,
        "a handle of nothing": addressof(nothing),
    }[way]
    code = collectives._library.flagcxAllReduce(memory, memory, MANY, TYPE, flagcx.SUM, communicator, stream)
    assert code != 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("npu") / "qwen3", **SIZES["qwen3"])


@pytest.fixture(scope="module")
def result(
    model: Path,
    standin: Callable[..., Path],
    npu_environment: Callable[..., dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, Any]:
    fault = tmp_path_factory.mktemp("fault") / "sums are wrong"
    spawned = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    engine = {
        "model": str(model),
        "dtype": "float16",
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 64 << 20,
        "max_logprobs": VOCABULARY,
    }
    job = {"engine": engine, "steps": steps(fault, reset=True)}
    return finish(SCRIPT, job, npu_environment(**variables(standin, fault), **spawned))


def test_two_ranks_that_communicate_through_flagcx_give_hugging_faces_tokens(
    model: Path, result: Mapping[str, Any]
) -> None:
    check_tokens(model, result)


def test_both_ranks_count_the_same_collectives_and_every_operator_is_the_vendors(result: Mapping[str, Any]) -> None:
    check_ranks(result)


def test_sums_without_one_ranks_part_change_the_tokens(result: Mapping[str, Any]) -> None:
    check_fault(result)

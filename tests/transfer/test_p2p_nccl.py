"""Wires over NCCL, with a library in its place that behaves as NCCL's manual says, and streams without a device."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from p2p_linked import BLOCK, SOON, connect, eventually, pair, travel

from fl_transfer.p2p.links import link as links
from fl_transfer.p2p.links.nccl import Nccl

SOURCE = Path(__file__).parent / "fake_nccl.c"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("nccl") / "libnccl.so"
    subprocess.run(["cc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE, "-lpthread"], check=True)
    return library


class Fake:
    """The library's knobs and counts."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.fake_busy.argtypes = (ctypes.c_void_p,)
        self.before = set(threading.enumerate())

    def threads(self) -> list[threading.Thread]:
        """Those of links that were made since."""
        return [one for one in set(threading.enumerate()) - self.before if one.name == "fl-p2p-link"]

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, f"fake_{name}").value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, f"fake_{name}").value = value


@pytest.fixture
def nccl(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    own = Path(shutil.copy(built, tmp_path / "libnccl.so"))  # a library of its own has counts of its own
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", str(own))
    fake, handles = Fake(own), count(1)

    class Stream:
        def __init__(self, device: Any) -> None:
            self.cuda_stream = next(handles)

        def synchronize(self) -> None:
            until = time.monotonic() + SOON
            while fake.library.fake_busy(self.cuda_stream):
                assert time.monotonic() < until, "the device is still at work"

    class Event:
        def record(self, stream: Stream) -> None:
            self.stream = stream.cuda_stream

        def query(self) -> bool:
            return not fake.library.fake_busy(self.stream)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    yield fake
    assert eventually(lambda: not fake.threads()), "no thread waits for ever"
    assert fake["aborted"] == fake["opened"], "no communicator is left"
    assert fake["misused"] == 0


def lose(two: Any) -> None:
    """A prompt is lost at both ends, and its memory comes back."""
    two.sender.send("lost", two.receiver.engine.address)
    two.receiver.box.await_("lost", two.sender.engine.address, 3)
    assert two.receiver.outcome("lost") != ""
    assert eventually(lambda: two.sender.box.asked("lost") != "")
    assert eventually(lambda: two.sender.taken() == two.receiver.taken() == 0)


def test_bytes_go_by_communicators_that_do_not_wait(nccl: Fake) -> None:
    with pair(Nccl(), Nccl()) as two:
        connect(two)
        assert travel(two, "second")["received_direct_bytes"] == 3 * BLOCK
        assert travel(two, "third")["received_direct_bytes"] == 3 * BLOCK
    assert (nccl["tickets"], nccl["opened"]) == (1, 2)


def test_a_link_whose_other_end_never_comes_leaves_neither_thread_nor_communicator(
    nccl: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "OPENING", 0.3)
    nccl["hold_open"] = 1
    with pair(Nccl(), Nccl()) as two:
        assert "received_direct_bytes" not in travel(two, "first")
        assert eventually(lambda: nccl["opened"] == nccl["aborted"] == 2)
        assert eventually(lambda: not nccl.threads())
        assert "received_direct_bytes" not in travel(two, "second")


@pytest.mark.parametrize("where", ["launch", "device"])
def test_a_transfer_that_hangs_is_aborted_by_the_thread_that_began_it(nccl: Fake, where: str) -> None:
    with pair(Nccl(), Nccl(), silence=0.5) as two:
        connect(two)
        nccl[f"hold_{where}"] = 1
        lose(two)
        assert eventually(lambda: nccl["opened"] == nccl["aborted"] == 2)
        time.sleep(0.6)  # the sender may have taken the receiver for dead
        assert "received_direct_bytes" not in travel(two, "after")


def test_a_communicator_that_fails_by_itself_is_noticed_before_any_time_limit(
    nccl: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(Nccl(), Nccl(), silence=SOON) as two:
        connect(two)
        nccl["fails"] = 1
        begun = time.monotonic()
        lose(two)
        assert time.monotonic() - begun < SOON / 2
        assert "NCCL: unhandled system error" in caplog.text


def test_an_engine_that_refuses_costs_no_ticket(nccl: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "OPENING", 0.01)
    with pair(Nccl(), Nccl()) as two:
        two.receiver.engine._incoming = None
        for number in range(5):
            travel(two, str(number))
            time.sleep(0.01 * 2**number)
    assert nccl["tickets"] == 0

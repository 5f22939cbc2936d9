"""An untrusted process as a function: arguments go through shared memory, and results are read as bytes.

Only the places of results are read from the process's answers, which are lines of JSON with every number checked. Its
standard output is discarded, and no object from it is deserialized here.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import NotSupported, text_of
from .timed import Timed, storages_of
from .worker import KEPT, PAGE

LONGEST_ANSWER = 1 << 18
"""Bytes of an answer's line."""
LOOK_SECONDS = 0.02
"""Seconds between checks of the memory of a process that has not answered yet."""
START_SECONDS = 120.0
"""Seconds to import PyTorch."""
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_", "ASCEND_", "TRITON_INTERPRET", "CXX")
"""Prefixes of the environment variables that the process gets; none of these contains a secret."""
SETTINGS = ("VLLM_FL_", "SGLANG_FL_", "FL_")
"""Prefixes of variables that a trusted function's process gets too; they may name the function's module."""
DTYPES = frozenset(str(one).removeprefix("torch.") for one in vars(torch).values() if isinstance(one, torch.dtype))


class Ended(BaseException):
    """The process ended, or broke a limit; the text says how."""


@dataclass(frozen=True)
class Limits:
    """The limits of a process.

    Args:
        seconds: seconds of one call, or of all calls of a timed question.
        megabytes: MiB of its memory, including its results.
        threads: PyTorch's threads.
        compilers: whether it may start processes and write files, as an accelerator's compilers do.
    """

    seconds: float = 20.0
    megabytes: int = 4096
    threads: int = 1
    compilers: bool = False


class Process:
    """A process that calls one function.

    Args:
        op_name: the operator.
        text: a candidate's text; empty for a trusted function.
        impl_id: the id of a registered implementation.
        device: the device of the arguments.
        limits: its limits.

    Raises:
        Ended: it could not start; the text says why.
    """

    def __init__(self, op_name: str, text: str, impl_id: str, device: torch.device, limits: Limits) -> None:
        self.limits, self.device = limits, device
        self._folder = Path(tempfile.mkdtemp(prefix="fl-prove-"))
        self._size = limits.megabytes << 20
        memory = os.memfd_create("fl-prove")
        os.ftruncate(memory, self._size)
        self._memory = mmap.mmap(memory, self._size)
        self._alive: OrderedDict[int, tuple[int, torch.UntypedStorage]] = OrderedDict()
        self._calls, self._said = 0, b""
        self.arrived = 0.0  # when the last answer did, by the clock of time.perf_counter
        (theirs, self._questions), (self._answers, answers) = os.pipe(), os.pipe()
        file = self._folder / "candidate.py"
        file.write_text(text, encoding="utf-8")
        task: dict[str, Any] = {"op": op_name, "file": str(file) if text else "", "impl": impl_id}
        task |= {"device": str(device), "questions": theirs, "answers": answers, "memory": memory, "bytes": self._size}
        prefixes = PASSED_ON if text else (*PASSED_ON, *SETTINGS)
        variables = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
        variables |= {"HOME": str(self._folder), "TMPDIR": str(self._folder)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", json.dumps({**task, "compilers": limits.compilers})],
            env={**variables, "OMP_NUM_THREADS": str(limits.threads)},
            cwd=self._folder,
            pass_fds=(theirs, answers, memory),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for descriptor in (theirs, answers, memory):
            os.close(descriptor)
        try:
            self._answer("start", START_SECONDS)
            loaded = self._answer("load", limits.seconds if text else START_SECONDS)
            if "raised" in loaded:
                raise Ended(_raised(loaded))
        except Ended:
            self.stop()
            raise

    def __call__(self, *args: Any) -> Any:
        """Make a call like the candidate's own: arguments that the candidate writes are written in place."""
        return self._called(args, {})

    def make(self, case: Timed, seed: int, calls: int) -> None:
        """Let the process make the arguments of ``calls`` calls on the device; it forgets those before.

        Raises:
            Ended: it could not; the text says why.
        """
        try:
            self._ask({"make": case.words, "seed": seed, "calls": calls}, START_SECONDS)
        except RuntimeError as error:
            raise Ended(f"the arguments of {calls} calls: {text_of(error)}") from error

    def time(self) -> float:
        """Return the seconds of these calls, from the question until the device has finished and the answer is here."""
        began = time.perf_counter()
        self._ask({"run": True}, self.limits.seconds)
        return self.arrived - began

    def fetch(self, number: int, args: Sequence[Any]) -> Any:
        """Return the result of one of these calls.

        Args:
            number: the call's number.
            args: copies of its arguments; those that the call wrote are written in place.

        Raises:
            Ended: there is no such result; the text says why.
        """
        try:
            return self._called(args, {"fetch": number})
        except RuntimeError as error:
            raise Ended(text_of(error)) from error

    def _called(self, args: Sequence[Any], asked: dict[str, Any]) -> Any:
        """Return the result of a call, with the arguments or with those that the process has."""
        given, places, end = storages_of(args), list[tuple[int, int]](), 0
        for storage in given:
            places.append((end, storage.nbytes()))
            end += (storage.nbytes() // PAGE + 1) * PAGE
        if end > self._size:
            raise Ended(f"the arguments have {end >> 20} MiB, more than it may use")
        self._calls += 1
        asked |= {"storages": [(at, max(1, size)) for at, size in places], "end": end}
        if "fetch" not in asked:
            numbers = {storage.data_ptr(): index for index, storage in enumerate(given)}
            asked["args"] = [_said(arg, numbers) for arg in args]
            asked["poisoned"] = torch.are_deterministic_algorithms_enabled()
            for (at, size), storage in zip(places, given, strict=True):
                if size:
                    self._bytes(at, size).copy_(_as_bytes(storage))
        try:
            answer = self._ask(asked, self.limits.seconds)
        finally:
            for (at, size), storage in zip(places, given, strict=True):
                if size:
                    _as_bytes(storage).copy_(self._bytes(at, size))
        try:
            results = [self._result(one, given, end) for one in answer["results"]]
            several = bool(answer["several"])
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise Ended("it answered with a result that no call has") from error
        return tuple(results) if several else results[0] if results else None

    def _ask(self, asked: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a question.

        Raises:
            NotSupported: the function declined.
            RuntimeError: it raised something.
            Ended: the process ended, or broke a limit.
        """
        to = secrets.token_hex(8)
        if self._said or select.select([self._answers], [], [], 0)[0]:
            raise Ended(self._last_words() or "it answered before it was asked")
        with contextlib.suppress(BrokenPipeError):
            os.write(self._questions, json.dumps({**asked, "to": to}).encode() + b"\n")
        answer = self._answer(to, seconds)
        if "raised" in answer:
            if answer["raised"][0] == NotSupported.__name__:
                raise NotSupported(str(answer["raised"][1])[:500])
            raise RuntimeError(_raised(answer))
        return answer

    def stop(self) -> None:
        """End the process and all its child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for descriptor in (self._questions, self._answers):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _bytes(self, at: int, size: int) -> Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=at)

    def _answer(self, to: str, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\n" not in self._said:
            if select.select([self._answers], [], [], LOOK_SECONDS)[0]:
                more = os.read(self._answers, 1 << 16)
                self.arrived = time.perf_counter()
                if not more:
                    raise Ended(self._last_words() or "its process ended")
                self._said += more
            if time.monotonic() > end:
                raise Ended(f"it took longer than {seconds:g} s")
            if self._used() > self.limits.megabytes:
                raise Ended(f"it used more than {self.limits.megabytes} MiB of memory")
            if len(self._said) > LONGEST_ANSWER:
                raise Ended("it answered at great length")
        line, _, self._said = self._said.partition(b"\n")
        try:
            answer = json.loads(line)
            if not isinstance(answer, dict) or answer.get("to") != to:
                raise ValueError
        except (ValueError, RecursionError):
            raise Ended("it wrote an answer of its own beside that of its call") from None
        return answer

    def _used(self) -> int:
        """Return the process's memory in MiB."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1]
            return int(pages) * mmap.PAGESIZE >> 20
        return 0

    def _last_words(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        return f"its process ended with {'signal' if code < 0 else 'status'} {abs(code)}"

    def _result(self, said: Any, given: list[torch.UntypedStorage], first: int) -> Tensor | None:
        """Return a tensor in this process's memory with the bytes that the other process named."""
        if said is None:
            return None
        shape, stride, offset = _sizes(said["shape"]), _sizes(said["stride"]), _size(said["offset"])
        if said["dtype"] not in DTYPES or len(shape) != len(stride):
            raise ValueError
        empty = torch.empty(0, dtype=getattr(torch, said["dtype"]), device=self.device)
        if "given" in said:
            storage = given[_size(said["given"])]
        else:
            at, size = _size(said["at"]), _size(said["size"])
            if at < first or at + size > self._size:
                raise ValueError
            storage = self._place(_size(said["address"]), size)
            if size:
                _as_bytes(storage).copy_(self._bytes(at, size))
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if 0 not in shape else 0
        if last * empty.element_size() > storage.nbytes():
            raise ValueError
        return empty.set_(storage, offset, shape, stride)

    def _place(self, address: int, size: int) -> torch.UntypedStorage:
        """Return memory for a result: that of an earlier living result with the same address, if there is one."""
        kept = self._alive.get(address)
        if kept is None or kept[1].nbytes() != size or kept[0] <= self._calls - KEPT:
            kept = (0, torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage())
        self._alive[address] = (self._calls, kept[1])
        while len(self._alive) > 8 * KEPT:
            self._alive.popitem(last=False)
        return kept[1]


def _said(arg: Any, given: dict[int, int]) -> dict[str, Any]:
    if isinstance(arg, Tensor):
        index = given[arg.untyped_storage().data_ptr()]
        form = {"dtype": str(arg.dtype).removeprefix("torch."), "shape": list(arg.shape), "stride": list(arg.stride())}
        return {**form, "storage": index, "offset": arg.storage_offset()}
    if isinstance(arg, torch.dtype):
        return {"constant": str(arg).removeprefix("torch.")}
    return {"value": arg}


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _raised(answer: dict[str, Any]) -> str:
    kind, text = answer["raised"]
    return f"{kind!s:.80}: {text!s:.500}"


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError
    return value


def _sizes(values: Any) -> list[int]:
    if not isinstance(values, list) or len(values) > 16:
        raise ValueError
    return [_size(one) for one in values]

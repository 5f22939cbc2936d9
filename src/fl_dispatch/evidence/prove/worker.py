"""The process that calls a candidate: it only computes results.

A line of JSON requests a call with the places of tensors in shared memory. The answer has the places of the results.
For a timed question the process makes the arguments of many calls itself, on the device, from a seed; see ``timed.py``.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import secrets
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...devices import device_of
from ...errors import NotSupported, text_of
from ...manager import OpManager, get_default_manager
from ...ops.results import flat
from ...registry import OpRegistry
from ...run.direct import direct_function, why_declined
from ..arguments import same_bits
from . import sandbox
from .candidate import read
from .timed import Timed, storages_of

KEPT = 4
"""Calls with results that stay alive, so that a later call cannot legitimately get their memory."""
PAGE = 4096


def functions_of(task: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a file's function, or an implementation's (asked once about arguments of one form).

    The second one takes all parameters of the operator, also those that a file's function does not have.
    """
    op_name = task["op"]
    if task["file"]:
        spec = importlib.util.spec_from_file_location("candidate", task["file"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        (candidate,) = read(Path(task["file"]).parent, op_name)
        if task["compilers"]:  # a driver starts by system calls that the sandbox refuses
            torch.ones(1, device=task["device"]).add_(1).item()
        sandbox.enter(task["compilers"])
        spec.loader.exec_module(module)
        found: Callable[..., Any] = getattr(module, op_name)
        registry = OpRegistry()
        registry.register_impl(candidate.implementation(found))
        (impl,) = registry.get_implementations(op_name)
        return found, direct_function(OpManager(registry, register_builtins=False).state, impl)
    manager = get_default_manager()
    manager.ensure_initialized()
    (impl,) = (one for one in manager.registry.get_implementations(op_name) if one.impl_id == task["impl"])
    direct = direct_function(manager.state, impl)
    taken: set[tuple[Any, ...]] = set()

    def call(*args: Any) -> Any:
        form = tuple(one.shape for one in args if isinstance(one, Tensor))
        if form not in taken:
            if why := why_declined(manager.state, impl, args):
                raise NotSupported(why)
            taken.add(form)
        return direct(*args)

    return call, call


class Calls:
    """Calls of one function, with arguments and results in shared memory.

    Args:
        op_name: the operator.
        functions: the function to call, and the function for timed questions.
        memory: the shared memory.
        device: the device of the arguments.
    """

    def __init__(
        self, op_name: str, functions: Sequence[Callable[..., Any]], memory: mmap.mmap, device: torch.device
    ) -> None:
        self.function, self.timed = functions
        self.op_name, self.memory, self.device = op_name, memory, device
        self.wait = partial(device_of(device.type).module().synchronize, device)
        self.given: list[tuple[Any, ...]] = []  # of the calls of a timed question, with their results
        self.results: list[Any] = []
        self.seen: tuple[int, list[Tensor]] = (0, [])  # one of these results, as it was before the answer
        self.alive: deque[Any] = deque(maxlen=KEPT)
        self.copies: dict[int, Tensor] = {}  # an accelerator's, with the same address in calls with the same sizes

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Make one call, or an answer to a part of a timed question."""
        if "make" in asked:
            self.results.clear()
            self.given = [*Timed(self.op_name, *asked["make"]).calls(self.device, asked["seed"], asked["calls"])]
            self.wait()
            return {}
        if "run" in asked:
            return self._run()
        shared = [torch.frombuffer(self.memory, dtype=torch.uint8, count=n, offset=at) for at, n in asked["storages"]]
        if "fetch" in asked:
            if not self._is_as_seen():
                return {"raised": ["RuntimeError", "a result changed after the clock had stopped"]}
            places, result = storages_of(self.given[asked["fetch"]]), self.results[asked["fetch"]]
        else:
            places = [self._place(one, at) for one, (at, _) in zip(shared, asked["storages"], strict=True)]
            args = [self._argument(one, places) for one in asked["args"]]
            torch._C._set_deterministic_algorithms(asked["poisoned"], warn_only=True)  # PyTorch's own imports Inductor
            result = self.function(*args)
            torch._C._set_deterministic_algorithms(False)
        for one, place in zip(shared, places, strict=True):
            if place.data_ptr() != one.data_ptr():  # an accelerator's copy of the memory that processes share
                one.copy_(torch.empty(0, dtype=torch.uint8, device=self.device).set_(place))
        self.alive.append(result)
        if not all(one is None or type(one) is Tensor for one in flat(result)):
            return {"raised": ["TypeError", f"it returns a {type(result).__name__}, not tensors"]}
        return {"results": self._results(result, places, asked["end"]), "several": isinstance(result, tuple | list)}

    def _run(self) -> dict[str, Any]:
        """Make the calls of a timed question; the answer leaves when the device has finished.

        A copy of one result, drawn after the calls, is made before: a result that is completed later differs from it.
        """
        function, results, wait = self.timed, self.results, self.wait
        for args in self.given:
            results.append(function(*args))
        wait()
        drawn = secrets.randbelow(len(results))
        self.seen = drawn, [one.clone() for one in flat(results[drawn]) if isinstance(one, Tensor)]
        wait()
        return {}

    def _is_as_seen(self) -> bool:
        drawn, seen = self.seen
        return same_bits(seen, [one for one in flat(self.results[drawn]) if isinstance(one, Tensor)])

    def _place(self, shared: Tensor, at: int) -> torch.UntypedStorage:
        """Return the memory of an argument on the device."""
        if shared.device.type == self.device.type:
            return shared.untyped_storage()
        copy = self.copies.get(at)
        if copy is None or len(copy) != len(shared):
            copy = self.copies[at] = torch.empty_like(shared, device=self.device)
        return copy.copy_(shared).untyped_storage()

    def _argument(self, said: Any, places: list[torch.UntypedStorage]) -> Any:
        if "value" in said:
            return said["value"]
        if "dtype" not in said:
            return getattr(torch, said["constant"])
        empty = torch.empty(0, dtype=getattr(torch, said["dtype"]), device=self.device)
        return empty.set_(places[said["storage"]], said["offset"], said["shape"], said["stride"])

    def _results(self, result: Any, places: list[torch.UntypedStorage], end: int) -> list[Any]:
        given = {place.data_ptr(): index for index, place in enumerate(places)}
        written: dict[int, int] = {}
        said: list[Any] = []
        for one in flat(result):
            if one is None:
                said.append(None)
                continue
            tensor = one.detach()
            place = tensor.untyped_storage()
            address, size = place.data_ptr(), place.nbytes()
            if address not in given and address not in written:
                written[address], end = end, end + -(-size // PAGE) * PAGE
                if size:
                    target = torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=written[address])
                    target.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(place))
            form = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            form |= {"stride": list(tensor.stride()), "offset": tensor.storage_offset()}
            where = {"given": given[address]} if address in given else {"at": written[address], "size": size}
            said.append({**form, **where, "address": address})
        return said


def main() -> None:
    """Answer until the questions end."""
    task = json.loads(sys.argv[1])
    sys.dont_write_bytecode = True
    torch.set_grad_enabled(False)
    with open(task["questions"], "rb", 0) as pipe, open(task["answers"], "wb", 0) as answers:
        questions = pipe
        memory = mmap.mmap(task["memory"], task["bytes"])

        def say(answer: dict[str, Any], to: str) -> None:
            answers.write(json.dumps({**answer, "to": to}).encode() + b"\n")

        say({}, "start")
        try:
            calls = Calls(task["op"], functions_of(task), memory, torch.device(task["device"]))
        except Exception as error:  # foreign code: whatever it raises is the finding
            say({"raised": [type(error).__name__, f"as it was imported: {text_of(error)}"]}, "load")
            return
        say({}, "load")
        lines = b""
        while True:
            while b"\n" not in lines:
                more = questions.read(1 << 16)
                if not more:
                    return
                lines += more
            line, _, lines = lines.partition(b"\n")
            asked = json.loads(line)
            try:
                answer = calls.answer(asked)
            except NotImplementedError as error:
                answer = {"raised": [NotSupported.__name__, str(error)]}
            except Exception as error:  # foreign code
                answer = {"raised": [type(error).__name__, text_of(error)]}
            say(answer, asked["to"])


if __name__ == "__main__":
    main()

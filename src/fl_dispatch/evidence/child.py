"""A process that answers lines: one line of JSON when it is ready, and one for each question.

Engines that are compared run in such processes, take turns, and wait in between.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DispatchError

PATIENCE = 30.0
"""Seconds that a process has to end normally."""


class Child:
    """A process that answers lines.

    Args:
        name: the process's name in messages.
        command: the program and its arguments.
        environment: its variables, all of them.
        log: file for its standard error; this process's standard error by default.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None
    ) -> None:
        self.name, self.log = name, log
        errors = None if log is None else log.open("w")
        try:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        finally:
            if errors is not None:
                errors.close()

    def answer(self) -> Any:
        """Return its next answer.

        Raises:
            DispatchError: the process ended, or its answer is not JSON.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DispatchError(f"the engine '{self.name}' ended with {self._process.wait()}{self._last_words()}")
        try:
            return json.loads(line)
        except ValueError:
            raise DispatchError(f"the engine '{self.name}' said {line.strip()!r} in place of an answer") from None

    def ask(self, question: Any) -> Any:
        """Return its answer to a question.

        Raises:
            DispatchError: the process ended.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer gives more information
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.answer()

    def stop(self) -> None:
        """End the process: close its input, and kill it if that is not enough."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        if self.log is None:
            return "; its messages are above"
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return f": {' '.join(last)} (its log: {self.log})"

"""Progress of the demonstration, one line per step; an engine's output goes to a log."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from ...errors import DispatchError, text_of
from ..output import console

TAIL = 30
"""Number of lines of the log shown with an error."""
CAUSE = re.compile(r"\b(\w+(?:Error|Exception|Interrupt): \S.*)")


@contextmanager
def steps(log: Path, silent: bool, verbose: bool) -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Yield a function that begins a step.

    Args:
        log: the file for the output of libraries and child processes.
        silent: print no step.
        verbose: do not redirect this output, and write no log.

    Raises:
        DispatchError: a step failed with any error; the end of the log is printed on standard error.
    """
    shown = Console(
        file=os.fdopen(os.dup(1), "w"), width=console.width, force_terminal=sys.stdout.isatty(), quiet=silent
    )

    @contextmanager
    def step(what: str) -> Iterator[None]:
        started = time.perf_counter()
        if not shown.is_terminal:
            shown.print(what + " …", highlight=False)
        waiting = shown.status(what + " …") if shown.is_terminal else nullcontext()
        try:
            with waiting, nullcontext() if verbose else _into(log):
                yield
        except DispatchError:
            raise
        except Exception as error:  # an engine may raise anything
            raise DispatchError(f"{what} failed: {_explained(error, log)}") from error
        shown.print(f"[green]✓[/] {what} [dim]({time.perf_counter() - started:.1f} s)[/]", highlight=False)

    yield step


def _explained(error: Exception, log: Path) -> str:
    """Print the end of the log; return the error with its cause in the engine's process, which only the log has."""
    text = text_of(error)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    if not lines:
        return text
    print("\n".join(lines[-TAIL:]), file=sys.stderr)
    causes = [found[1] for line in lines if (found := CAUSE.search(line))]
    cause = f"; the last error in its log: {causes[-1]}" if causes and causes[-1] not in text else ""
    return f"{text}{cause} (the last {min(TAIL, len(lines))} lines of the log are above, --verbose shows all)"


@contextmanager
def _into(log: Path) -> Iterator[None]:
    """Send this process's and its children's output to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)

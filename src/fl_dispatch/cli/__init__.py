"""The command ``fl``: the implementations that run, why, and whether they are healthy."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from ..errors import DispatchError, text_of
from ..logger_manager import get_logger
from ..version import __version__
from . import bench, bisect, demo, doc, doctor, explain, new_backend, ops, perplexity, prove, report, tune, verify
from .output import MeasuringCommand, fail

logger = get_logger(__name__)
app = typer.Typer(
    name="fl",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"fl-dispatch {__version__}")
        raise typer.Exit


@app.callback()
def fl(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One operator, many chips: see and try what runs under vLLM and SGLang, and why."""


app.command("demo")(demo.demo)
app.command("perplexity", cls=MeasuringCommand)(perplexity.perplexity_command)
app.command("ops")(ops.ops)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.command("verify", cls=MeasuringCommand)(verify.verify)
app.command("bench", cls=MeasuringCommand)(bench.bench)
app.command("prove", cls=MeasuringCommand)(prove.prove)
app.command("tune")(tune.tune)
app.command("report")(report.report)
app.command("bisect")(bisect.bisect)
app.command("doc")(doc.doc)
app.command("new-backend")(new_backend.new_backend)


def _add_commands() -> None:
    """Add the commands that other packages have in the entry point group ``fl_dispatch.command``."""
    for point in sorted(entry_points(group="fl_dispatch.command"), key=lambda point: point.name):
        try:
            app.command(point.name)(point.load())
        except Exception as error:
            logger.warning(
                "fl %s (%s) is left out, because it does not load: %s", point.name, point.value, text_of(error)
            )


_add_commands()


def main() -> None:
    """Run a command; a :class:`DispatchError` becomes one message and exit code 2, never a traceback."""
    try:
        app()
    except DispatchError as error:
        fail(str(error))
        sys.exit(2)

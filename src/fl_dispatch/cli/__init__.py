"""The command ``fl``: what runs, why, and whether it is healthy."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..errors import DispatchError
from ..version import __version__
from . import bench, bisect, demo, doc, doctor, explain, new_backend, ops, p2p_proxy, perplexity, report, tune, verify
from .output import MeasuringCommand, fail

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
app.command("tune")(tune.tune)
app.command("report")(report.report)
app.command("bisect")(bisect.bisect)
app.command("doc")(doc.doc)
app.command("new-backend")(new_backend.new_backend)
app.command("p2p-proxy")(p2p_proxy.p2p_proxy)


def main() -> None:
    """Entry point: an error of ours is one message and exit code 2, never a traceback."""
    try:
        app()
    except DispatchError as error:
        fail(str(error))
        sys.exit(2)

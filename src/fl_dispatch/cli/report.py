"""``fl report``: one page of HTML about what runs here and everything that was measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import DispatchError, text_of
from .output import AsJson, check_file, console, print_json


def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Results of other commands (JSON), and folders of them. Default: none."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The HTML file to write.", dir_okay=False)] = Path("report.html"),
    json: AsJson = False,
    runs: Annotated[bool, typer.Option("--runs/--no-runs", help="Show the workers that ran last.")] = True,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a file that lacks date, machine, versions, commit or command.")
    ] = False,
) -> None:
    """Write one self-contained HTML file: choices and reasons, verdicts, speeds, tuning, findings, engines.

    The command reads results of fl verify, fl bench, fl tune, fl perplexity, fl demo and the benchmarks of engines. A
    named file of an unknown kind is an error; those in a folder are listed at the end of the page. Figures without
    date, machine, versions, commit or command are marked. The page needs no network, and follows the system's dark
    mode.
    """
    check_file(out)
    from ..evidence.report import build, render  # late: a template engine, which is an extra

    made = build(files or [], runs, strict)
    text = render(made)
    new = out.with_name(f"{out.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(out)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise DispatchError(f"{out} cannot be written: {text_of(error)}") from error
    if json:
        sections = {section.title: list(section.summary) for section in made.sections if section.parts}
        print_json({"page": str(out), "bytes": len(text.encode()), "sections": sections})
        return
    console.print(f"{out}: {len(text) / 1e6:.1f} MB", highlight=False, markup=False)
    for section in made.sections:
        said = " ".join(section.summary) if section.parts else f"no data; `{section.fill}` measures it"
        console.print(f"  {section.title}: {said}", highlight=False, markup=False)

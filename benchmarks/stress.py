"""Stress test of the core: threads, tasks, forks and managers at once in one process, with every result checked.

``tests/support/storm.py`` runs: threads call by name, by keyword and bound, in policy contexts and outside, while
others register, change the global policy, lift bans, ask availability again, make managers and drop them, and run
tasks; one implementation fails now and then. Meanwhile two threads fork at random moments, half of the time inside a
context; each child calls, registers, enters a context, changes the policy and starts a thread. Fresh processes start by
``spawn`` and ``forkserver``.

    python benchmarks/stress.py [--seconds N] [--forks N] [--fresh N] [--json FILE]

Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import resource
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))

from fl_dispatch import OpManager
from fl_dispatch.cli.output import print_table
from fl_dispatch.evidence.origin import write
from storm import Figures, storm

ROUND_SECONDS, ROUND_FORKS = 30.0, 100  # each round starts on a new default manager


def managers() -> int:
    """Return the number of live managers."""
    gc.collect()
    return sum(type(thing) is OpManager for thing in gc.get_objects())


def resident_mib() -> int:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def run(seconds: float, forks: int, fresh: int) -> tuple[Figures, list[dict[str, int]]]:
    """Run rounds until the time is over and the forks are done; return the memory and managers after each."""
    total, left = Figures(), []
    number = 0
    while total.seconds < seconds or total.counts["forks"] < forks:
        now = min(ROUND_FORKS, max(0, forks - total.counts["forks"]))
        figures = storm(min(ROUND_SECONDS, seconds), forks=now, fresh=fresh if number == 0 else 0, seed=number)
        total.counts += figures.counts
        total.failures += figures.failures
        total.seconds += figures.seconds
        left.append({"managers": managers(), "resident_mib": resident_mib()})
        number += 1
        done = ", ".join(f"{count:,} {name}" for name, count in total.counts.items())
        print(f"round {number}, {total.seconds:.0f} s: {done}, {len(total.failures)} failures", flush=True)
        if figures.counts["forks"] < now:
            break
    return total, left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--forks", type=int, default=100)
    parser.add_argument("--fresh", type=int, default=2, help="children by spawn, and as many by forkserver")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures, left = run(options.seconds, options.forks, options.fresh)
    rows = [[name, f"{count:,}"] for name, count in sorted(figures.counts.items())]
    rows += [["seconds", f"{figures.seconds:.0f}"], ["failures", str(len(figures.failures))]]
    rows += [["managers alive after each round", ", ".join(str(after["managers"]) for after in left)]]
    rows += [["resident MiB after each round", ", ".join(str(after["resident_mib"]) for after in left)]]
    print_table("Stress", ("what", "how many"), rows)
    for failure in figures.failures[:20]:
        print(failure)
    if options.json:
        machine = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "date": time.strftime("%Y-%m-%d"),
            "command": f"python benchmarks/stress.py --seconds {options.seconds:g} --forks {options.forks} "
            f"--fresh {options.fresh}",
        }
        results = {**dict(sorted(figures.counts.items())), "seconds": round(figures.seconds, 1)}
        results |= {"failures": len(figures.failures), "after_each_round": left}
        write(options.json, {"machine": machine, "results": results})
    sys.exit(bool(figures.failures))


if __name__ == "__main__":
    main()

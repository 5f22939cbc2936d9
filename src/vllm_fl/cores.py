"""The cores of a CPU worker: ``VLLM_CPU_OMP_THREADS_BIND`` means the same as on vLLM's own CPU platform.

- ``auto``, the default: each worker keeps to one NUMA node, and has one thread for each of its physical cores.
- ``nobind``: the operating system decides.
- ``0-7|8-15``: a list of cores for each worker on this machine, separated by ``|``.

``OMP_NUM_THREADS`` sets the number of threads; cores are then bound only by a list.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import torch

from fl_dispatch import ConfigError
from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
SYSTEM = Path("/sys/devices/system")


def cores_for(
    worker: int, workers: int, allowed: frozenset[int], environment: Mapping[str, str], system: Path = SYSTEM
) -> list[int] | None:
    """Return the cores of one worker; ``None`` if none are bound.

    Args:
        worker, workers: its number, and the number of workers on this machine.
        allowed: the logical CPUs that this process may use.
        environment: the environment variables.
        system: the folder in which the operating system describes the machine.

    Raises:
        ConfigError: the variable does not have a list for each worker, or names a core that this process may not use.
    """
    wish = environment.get(VARIABLE, "") or "auto"
    if wish == "nobind" or (wish == "auto" and environment.get("OMP_NUM_THREADS")):
        return None
    if wish == "auto":
        nodes = _nodes(allowed, system)
        if not nodes or (len(nodes) == 1 and workers > 1):
            return None  # several workers on one node share its cores by their numbers of threads
        cores = nodes[worker % len(nodes)]
        return None if len(cores) == len(allowed) else cores
    lists = [_parsed(part, wish) for part in wish.split("|")]
    if len(lists) != workers:
        raise _wrong(f"names the cores of {len(lists)} workers, and {workers} run on this machine: {wish!r}")
    if missing := sorted(set(lists[worker]) - allowed):
        raise _wrong(f"names cores that this process may not use: {', '.join(map(str, missing))}")
    return lists[worker]


def check(environment: Mapping[str, str]) -> None:
    """Refuse a malformed list of cores, for any number of workers.

    Raises:
        ConfigError: see :func:`cores_for`.
    """
    wish = environment.get(VARIABLE, "") or "auto"
    workers = 1 if wish in ("auto", "nobind") else wish.count("|") + 1
    for worker in range(workers):
        cores_for(worker, workers, frozenset(os.sched_getaffinity(0)), environment)


def share_out(workers: int, environment: MutableMapping[str, str], system: Path = SYSTEM) -> None:
    """Write the cores of every worker on this machine into the variable, in the parent of all of them.

    Raises:
        ConfigError: see :func:`cores_for`.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    lists = [cores_for(worker, workers, allowed, environment, system) for worker in range(workers)]
    if cores := [one for one in lists if one is not None]:
        environment[VARIABLE] = "|".join(",".join(map(str, one)) for one in cores)


def bind(cores: list[int] | None) -> None:
    """Bind this process, with all its threads, to these cores, and use one thread for each."""
    if cores is None:
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended since
            os.sched_setaffinity(int(thread), cores)
    torch.set_num_threads(len(cores))
    logger.info("cores %s, one thread each (%s)", ",".join(map(str, cores)), VARIABLE)


def _nodes(allowed: frozenset[int], system: Path) -> list[list[int]]:
    """Return one logical CPU of each allowed physical core, by NUMA node."""
    nodes = []
    for node in sorted(system.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores: dict[str, int] = {}
        for cpu in sorted(set(_parsed(node.joinpath("cpulist").read_text(), "cpulist")) & allowed):
            siblings = system / f"cpu/cpu{cpu}/topology/thread_siblings_list"
            cores.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), cpu)
        if cores:
            nodes.append(sorted(cores.values()))
    return nodes


def _parsed(text: str, whole: str) -> list[int]:
    """Parse numbers such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise _wrong(f"is 'auto', 'nobind', or a list of cores for each worker such as '0-7|8-15', not {whole!r}")
        numbers |= {*range(int(first), int(last if dash else first) + 1)}
    return sorted(numbers)


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"environment variable {VARIABLE}", None, problem)

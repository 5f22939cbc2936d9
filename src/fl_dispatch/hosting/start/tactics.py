"""Tactics: the configurations that Triton's autotuner found fastest, each for one kernel at one key.

A key consists of sizes and dtypes of a call, as the kernel's author lists them. Another configuration may add in
another order, and two processes that time the same configurations may choose differently. So a start reads earlier
choices on this machine, the ranks agree on one choice for each key (:mod:`fl_dispatch.hosting.ranks.agreement`), a file
keeps it for later starts, and timing ends.
"""

from __future__ import annotations

import ast
import fcntl
import gc
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import platformdirs
import torch

from ...devices import detect_device
from ...devices.triton import why_unavailable
from ...errors import DispatchError
from ...logger_manager import get_logger
from ...settings import get_settings
from ..records.private_file import write_private

logger = get_logger(__name__)

Key = tuple[Any, ...]
Tactics = dict[str, dict[Key, str]]
"""Kernel → key → its configuration in words."""
PLAIN = {bool, int, float, str, type(None), torch.dtype}
"""Types of a key's parts that mean the same in another process."""
AT_ONCE = [0.0] * 3
"""Times of the configuration that is taken without timing, in the autotuner's form."""
NEVER = [float("inf")] * 3
"""Times of the other configurations."""
INDUCTORS = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
"""Settings with which Inductor times kernels that otherwise have one configuration."""


def chosen() -> Tactics:
    """Return the tactics of this process."""
    found: Tactics = {}
    for name, tuners in _tuners().items():
        for tuner in tuners:
            plain = {key: str(config) for key, config in tuner.cache.items() if {*map(type, key)} <= PLAIN}
            if plain:
                found.setdefault(name, {}).update(plain)
    return found


def united(tactics: Iterable[Tactics]) -> Tactics:
    """Merge the tactics of several processes; if they differ, the first one's count."""
    found: Tactics = {}
    for one in tactics:
        for name, choices in one.items():
            found[name] = choices | found.get(name, {})
    return found


def differing(tactics: Iterable[Tactics], agreed: Tactics) -> int:
    """Return the number of kernels with another configuration in one of several processes."""
    pairs = [(name, key, words) for one in tactics for name, choices in one.items() for key, words in choices.items()]
    return len({name for name, key, words in pairs if agreed[name][key] != words})


def install(tactics: Tactics) -> None:
    """Install tactics in every kernel that can use them; other keys keep their choices."""
    changed = []
    for name, tuners in _tuners().items():
        for tuner in tuners:
            known = {str(config): config for config in (*tuner.configs, *tuner.cache.values())}
            for key, words in tactics.get(name, {}).items():
                if words in known and str(tuner.cache.get(key)) != words:
                    tuner.cache[key] = known[words]
                    changed.append(tuner)
    for launcher in _interfaces() if changed else ():
        if any(inner is tuner for inner in _inside(launcher) for tuner in changed):
            for kept in vars(launcher).get("kernel_cache", ()):  # FlagGems keeps its launched kernels
                kept.clear()


def begin() -> None:
    """Begin a start: kernels are timed, except where earlier starts chose."""
    if (autotuner := _autotuner()) is None:
        return
    if is_sealed():  # for another engine in this process
        for name, tuners in _tuners().items():
            for tuner in tuners:
                for key in tuner.cache.keys() - autotuner._bench.agreed.get(name, {}).keys():
                    del tuner.cache[key]
        autotuner._bench = autotuner._bench.timed
    install(remembered({})[0])


def is_sealed() -> bool:
    """Whether timing has ended."""
    return hasattr(getattr(_autotuner(), "_bench", None), "timed")


def seal() -> None:
    """End timing: at a key without a tactic a kernel runs the first configuration that the device takes.

    To find it, configurations are compiled and loaded but not launched, because kernels may overwrite their inputs.
    """
    if (autotuner := _autotuner()) is None or is_sealed():
        return
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    def first(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if isinstance(self.nargs, _Served):
            return NEVER
        try:
            kernel = self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
            getattr(kernel, "_init_handles", bool)()  # the interpreter has no compiled kernel
        except (CompileTimeAssertionFailure, OutOfResources, PTXASError):
            return NEVER
        self.nargs = _Served(self.nargs)
        return AT_ONCE

    vars(first).update(timed=autotuner._bench, agreed=chosen())
    autotuner._bench = first


class _Served(dict[str, Any]):
    """Arguments of a call for which a configuration was found."""


# -- the file ----------------------------------------------------------------------------------------------------------


def remembered(tactics: Tactics) -> tuple[Tactics, int]:
    """Return the tactics of earlier starts on such a chip, completed by these; and the number of earlier ones.

    The result is kept for later starts. Processes that start at the same time wait for each other, so replicas agree,
    too.
    """
    path, place = _file(), _place()
    try:
        with _alone(path):
            kept = _read(path)
            before = _loaded(kept.get(place, {}))
            found = united((before, tactics))
            if found != before:
                kept[place] = stored(found)
                write_private(path, json.dumps(kept, indent=1, sort_keys=True), "tactics of kernels")
    except (OSError, DispatchError) as error:
        logger.warning("tactics of kernels are chosen anew at every start: %s", error)
        return tactics, 0
    return found, sum(len(choices) for choices in before.values())


def stored(tactics: Tactics) -> dict[str, dict[str, str]]:
    """Return tactics as plain data."""
    return {name: {repr(key): words for key, words in choices.items()} for name, choices in sorted(tactics.items())}


def _loaded(plain: Any) -> Tactics:
    """Read the data of :func:`stored`, without keys that Python does not write as it reads them, and other data."""
    found: Tactics = {}
    for name, choices in plain.items() if isinstance(plain, dict) else ():
        for text, words in choices.items() if isinstance(choices, dict) else ():
            try:
                key = ast.literal_eval(text)
                repr(key)  # fails for numbers of thousands of digits
                found.setdefault(name, {})[key] = str(words)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return found


def _file() -> Path:
    return platformdirs.user_cache_path("fl-dispatch") / "tactics.json"


def _place() -> str:
    """Return where tactics are valid: the chip, its driver, and the compiler."""
    import triton

    spec = detect_device()
    versions = f"driver {spec.driver_version()}, Triton {triton.__version__}, PyTorch {torch.__version__}"
    return f"{spec.device_name(0)}, {versions}"


def _read(path: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Read a file of tactics; a damaged one counts as empty."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        logger.warning("tactics of kernels are chosen anew, because %s is damaged: %s", path, error)
        return {}
    return kept if isinstance(kept, dict) else {}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Exclude other processes from the block."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# -- what else is timed ------------------------------------------------------------------------------------------------


def timed_elsewhere() -> list[str]:
    """Return in words what else chooses by timing in this process, with the setting that ends it."""
    found = []
    if _autotuner() is not None and not get_settings().seal_tactics:
        found.append("Triton, at new sizes (VLLM_FL_SEAL_TACTICS=1)")
    if torch.cuda.is_available() and torch.cuda.tunable.is_enabled() and torch.cuda.tunable.tuning_is_enabled():
        found.append("TunableOp (PYTORCH_TUNABLEOP_TUNING=0)")
    if torch.backends.cudnn.benchmark:
        found.append("cuDNN (torch.backends.cudnn.benchmark = False)")
    inductor = getattr(sys.modules.get("torch._inductor"), "config", None)
    if names := [name for name in INDUCTORS if getattr(inductor, name, False)]:
        found.append(f"Inductor ({', '.join(names)} off)")
    timed = [one for one in _interfaces() if getattr(one, "autotune_time_taken_ns", 0)]
    if timed and not getattr(inductor, "deterministic", False):
        found.append(f"Inductor, {len(timed)} kernels (TORCHINDUCTOR_DETERMINISTIC=1)")
    return found


def processor() -> str:
    """Return in words by what libraries of a CPU choose in this process; empty with an accelerator."""
    spec = detect_device()
    return "" if spec.accelerator else f"{torch.get_num_threads()} of {spec.device_name(0)}"


# -- autotuners --------------------------------------------------------------------------------------------------------


def _autotuner() -> Any:
    """Return Triton's autotuner class; ``None`` if it is unused or not imported."""
    return None if why_unavailable() else getattr(sys.modules.get("triton.runtime.autotuner"), "Autotuner", None)


def _interfaces() -> list[Any]:
    """Return the kernel launchers of this process: autotuners, and wrappers around them."""
    kind: Any = None if _autotuner() is None else sys.modules["triton.runtime.jit"].KernelInterface
    return [] if kind is None else [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _inside(launcher: Any) -> Iterator[Any]:
    """Yield a launcher and the launchers that it calls."""
    while launcher is not None:
        yield launcher
        launcher = vars(launcher).get("fn") if hasattr(launcher, "__dict__") else None


def _tuners() -> dict[str, list[Any]]:
    """Return kernel → its autotuners, which have the same source and configurations."""
    found: dict[str, list[Any]] = {}
    if (kind := _autotuner()) is None:
        return found
    for one in _interfaces():
        if isinstance(one, kind) and len(one.configs) > 1 and isinstance(one.cache, dict):
            text = "; ".join((_source(one.base_fn), *map(str, one.configs)))
            version = hashlib.sha256(text.encode()).hexdigest()[:8]
            found.setdefault(f"{one.base_fn.__module__}.{one.base_fn.__qualname__} {version}", []).append(one)
    return found


@cache
def _source(kernel: Any) -> str:
    """Return the source of a kernel and of every jitted function that it calls, with the constants that they read.

    A function without a file has no source.
    """
    from triton.language import constexpr

    texts, functions = list[str](), [kernel]
    for fn in functions:  # it grows
        with suppress(OSError, TypeError):
            texts.append(inspect.getsource(fn))
        spaces: list[Mapping[str, Any]] = [fn.__globals__]
        with suppress(ValueError):  # a name that was not assigned yet
            spaces.append(inspect.getclosurevars(fn).nonlocals)
        for space in spaces:  # modules are added, because a kernel may call their functions
            for name in sorted(space.keys() & {*fn.__code__.co_names, *fn.__code__.co_freevars}):
                value = space[name]
                if isinstance(value, ModuleType):
                    spaces += [] if any(known is vars(value) for known in spaces) else [vars(value)]
                elif isinstance(value, constexpr):
                    texts.append(f"{name} = {value}")
                elif not isinstance(value, type | FunctionType):
                    jitted = next((inner for inner in _inside(value) if inspect.isfunction(inner)), None)
                    functions += [] if jitted is None or jitted in functions else [jitted]
    return "\n".join(texts)

"""Every error this package raises on purpose. A message says what happened, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class DispatchError(Exception):
    """Base of all errors of this package."""


class ConfigError(DispatchError, ValueError):
    """A setting is wrong. Raised before anything runs.

    Args:
        source: where it was read, such as ``/etc/fl.yaml, line 3`` or ``environment variable VLLM_FL_PREFER``.
        key: the item inside the source, or ``None`` when the source as a whole is wrong.
        problem: what is wrong with it, and what would be right.
    """

    def __init__(self, source: str, key: str | None, problem: str) -> None:
        self.source, self.key, self.problem = source, key, problem
        where = f"{source}: {key}: " if key else f"{source}: "
        super().__init__(where + problem)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str | None, str]]:
        return type(self), (self.source, self.key, self.problem)


class ConfigFileNotFoundError(ConfigError, FileNotFoundError):
    """A config file that the user named does not exist."""

    __str__ = Exception.__str__  # OSError's own would print the two bases' fields


class DeviceError(DispatchError, ValueError):
    """A device's spec is wrong, or PyTorch cannot use the device that it describes.

    Args:
        device: the spec's name.
        problem: what is wrong with it, and what would be right.
    """

    def __init__(self, device: str, problem: str) -> None:
        self.device, self.problem = device, problem
        super().__init__(f"device '{device}': {problem}")

    def __reduce__(self) -> tuple[type[DeviceError], tuple[str, str]]:
        return type(self), (self.device, self.problem)


class RegistrationError(DispatchError, ValueError):
    """An implementation cannot be registered: a duplicate id, or a signature that differs from the declaration."""


class PluginLoadError(DispatchError, ImportError):
    """A plugin module that the user named did not load."""


class NoImplementationError(DispatchError, RuntimeError):
    """No implementation of an operator is allowed, available and fit for the arguments.

    Args:
        op_name: the operator.
        reasons: one line for each implementation that was not taken.
    """

    def __init__(self, op_name: str, reasons: Sequence[str] = ()) -> None:
        self.op_name, self.reasons = op_name, tuple(reasons)
        lines = "".join(f"\n  {reason}" for reason in self.reasons)
        super().__init__(
            f"No available implementation for op='{op_name}'{':' if lines else ''}{lines}\n"
            f"`fl ops` lists what is registered, `fl explain {op_name}` says which settings decide"
        )

    def __reduce__(self) -> tuple[type[NoImplementationError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.op_name, self.reasons)


class NotSupported(DispatchError, NotImplementedError):  # noqa: N818  (it is an answer, not an error)
    """An implementation declines these arguments and promises that it has written nothing: the next candidate runs."""


class BrokenPromiseError(DispatchError, RuntimeError):
    """A result is not what the declaration says: another number, dtype, shape or layout."""


class WrongResultError(DispatchError, RuntimeError):
    """A result in a live call was further from the reference's than the operator's tolerance allows."""


class RankDivergenceError(DispatchError, RuntimeError):
    """One rank of a group that runs in lockstep would have fallen back while the others did not."""


class DispatchFrozenError(DispatchError, RuntimeError):
    """Dispatch is frozen, and a change would make something else run.

    Args:
        change: what was to change, such as ``the global policy``.
        differences: one line for each operator that would run something else.
    """

    def __init__(self, change: str, differences: Sequence[str]) -> None:
        self.change, self.differences = change, tuple(differences)
        lines = "".join(f"\n  {difference}" for difference in self.differences)
        super().__init__(
            f"dispatch is frozen, and {change} would change what runs; make the change before freeze_dispatch(), or "
            f"call thaw_dispatch() where nothing compiled depends on it:{lines}"
        )

    def __reduce__(self) -> tuple[type[DispatchFrozenError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.change, self.differences)


MOST_CHARACTERS = 2_000
"""The most of an error's text in a log line, a ban and a note: a compiler's output may have millions."""


def text_of(error: BaseException) -> str:
    """An exception as text, whatever its class does; a long one's beginning and end, with its length."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception as broken:
        return f"{type(error).__name__} (its text raises {type(broken).__name__})"
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text):,} characters in all ...] {text[-half:]}"

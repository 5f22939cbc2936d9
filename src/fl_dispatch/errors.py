"""Errors that this package raises on purpose. A message says what happened, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class DispatchError(Exception):
    """Base of all errors of this package."""


class ConfigError(DispatchError, ValueError):
    """A wrong setting, raised before anything runs.

    Args:
        source: where the setting was read, such as ``/etc/fl.yaml, line 3`` or ``environment variable VLLM_FL_PREFER``.
        key: the item inside the source, or ``None`` when the source as a whole is wrong.
        problem: what is wrong, and what would be right.
    """

    def __init__(self, source: str, key: str | None, problem: str) -> None:
        self.source, self.key, self.problem = source, key, problem
        where = f"{source}: {key}: " if key else f"{source}: "
        super().__init__(where + problem)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str | None, str]]:
        return type(self), (self.source, self.key, self.problem)


class ConfigFileNotFoundError(ConfigError, FileNotFoundError):
    """A config file that the user named and that does not exist."""

    __str__ = Exception.__str__  # OSError.__str__ would print the fields of both bases


class DeviceError(DispatchError, ValueError):
    """A wrong device spec, or a device that PyTorch cannot use.

    Args:
        device: the spec's name.
        problem: what is wrong, and what would be right.
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
    """An implementation's answer that it declines these arguments and wrote nothing; the next candidate runs."""


class BrokenPromiseError(DispatchError, RuntimeError):
    """A result that differs from the declaration in number, dtype, shape or layout."""


class WrongResultError(DispatchError, RuntimeError):
    """A result of a live call that differs from the reference's by more than the operator's tolerance."""


class RankDivergenceError(DispatchError, RuntimeError):
    """Ranks of one engine would run different implementations: their choices differ, or one rank alone fell back."""


class DispatchFrozenError(DispatchError, RuntimeError):
    """A change that would make another implementation run while dispatch is frozen.

    Args:
        change: the refused change, such as ``the global policy``.
        differences: one line for each operator that would run another implementation.
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
"""Characters of an error's text that a log line, a ban or a note keeps at most; a compiler may print millions."""


def text_of(error: BaseException) -> str:
    """Return an exception as text, whatever its class does; shorten a long text to its beginning, end and length."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception as broken:
        return f"{type(error).__name__} (its text raises {type(broken).__name__})"
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text):,} characters in all ...] {text[-half:]}"

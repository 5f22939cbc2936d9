"""The start of a host's plugin in one process: whether it runs and why, and an error kept for later.

Hosts call a plugin's entry points in every process and swallow their exceptions. So the plugin keeps an error, and
raises it from the next place that its host does not wrap. A host's own command ends with the error as one line.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from ...devices import detect_device
from ...errors import DispatchError
from ...logger_manager import begin_logging, get_logger
from ...settings import Settings, get_settings, register_layers
from ...settings import __name__ as settings_package
from ..facts.host import Host

WARNED = "FL_DISPATCH_WARNED"
"""The variable that a host's first process sets for its children after it has warned of settings."""


@dataclass
class Startup:
    """The start of one plugin.

    Args:
        plugin: the plugin's package.
        host: its host.
        group: the entry point group of the host's platforms.
        alone: the setting that makes the host ask only this plugin.
        commands: modules of the host's commands that start an engine.
        error: the first error that was kept.
        warned: warnings that were logged, each once.
    """

    plugin: str
    host: Host
    group: str
    alone: str
    commands: tuple[str, ...] = ()
    error: Exception | None = None
    warned: set[str] = field(default_factory=set)

    @property
    def logger(self) -> logging.Logger:
        """Return the plugin's logger."""
        return get_logger(f"{self.plugin}.startup")

    def decide(self, judge: Callable[[Settings], tuple[bool, str]]) -> bool:
        """Return whether the plugin runs, and log it with the reason.

        Args:
            judge: the plugin's own answer and reason, for a device that is not left to the host.
        """
        device, settings = detect_device(), get_settings()
        left = device.left_to_host.get(self.host.name)  # why the device, and not the user, keeps it from running
        active, reason = judge(settings) if left is None else (False, f"device '{device.name}' is not served: {left}")
        level = logging.INFO if left is None else logging.WARNING
        self.logger.log(level, "%s is %s: %s", self.plugin, "active" if active else "not active", reason)
        return active

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read the settings in this block; users may name the host's layer classes in them.

        A host's child process does not repeat warnings of the first process.
        """
        register_layers(self.host.name, self.host.layers.names)
        begin_logging()
        settings = logging.getLogger(settings_package)
        level = settings.level
        if is_child() and WARNED in os.environ:
            settings.setLevel(logging.ERROR)
        os.environ[WARNED] = "1"
        try:
            yield
        finally:
            settings.setLevel(level)

    def reason(self, state: str = "") -> str:
        """Return why this plugin runs: this machine's device, and other installed platforms.

        A host ends if two plugins want to run, without naming the setting that decides.
        """
        device, own = detect_device(), f"{self.plugin}:"
        variable, _, value = self.alone.partition("=")
        others = [entry.name for entry in entry_points(group=self.group) if not entry.value.startswith(own)]
        alone = not others or os.environ.get(variable) == value
        beside = "" if alone else f"; also installed, and only one may be active: {', '.join(others)}; set {self.alone}"
        return f"device '{device.name}' ({device.device_name(0)}){state}{beside}"

    def warn_of_unverified_device(self) -> None:
        """Log one WARNING if this machine's device is unverified under the host."""
        if reason := detect_device().unverified(self.host.name):
            self.warn(f"{reason}: compare tokens before you rely on it (docs/guide/chips.md)")

    def warn(self, sentence: str) -> None:
        """Log a WARNING, unless this process has logged it before."""
        if sentence not in self.warned:
            self.warned.add(sentence)
            self.logger.warning("%s", sentence)

    def keep(self, error: Exception) -> None:
        """Keep the first error of an entry point; end the host's own command with it."""
        if isinstance(error, DispatchError):
            self._end_command(error)
        if self.error is None:
            self.error = error

    def raise_kept(self) -> None:
        """Raise the error that an entry point kept."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """End the host's own command with one line if something cannot be served (``ConfigError``, ``ValueError``).

        Any other program gets the exception, as the host passes it on.
        """
        try:
            yield
        except (DispatchError, ValueError) as error:
            self._end_command(error)
            raise

    def _end_command(self, error: Exception) -> None:
        if runs_command(self.commands):
            self.logger.debug("the start ends here", exc_info=error)
            print(f"{self.plugin}: error: {error}", file=sys.stderr, flush=True)  # noqa: T201  the command's last line
            raise SystemExit(1) from None


def is_child() -> bool:
    """Whether another process started this one by ``multiprocessing``, as hosts start workers.

    A spawned process does not know its parent while it unpickles its target, which imports the host and calls the
    plugin.
    """
    return multiprocessing.parent_process() is not None or "--multiprocessing-fork" in sys.orig_argv


def runs_command(modules: tuple[str, ...]) -> bool:
    """Whether this process is a command from one of these modules, not a user's program or a child process."""
    main = sys.modules["__main__"]
    if is_child():
        return False
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m MODULE
        return spec.name in modules
    script = Path(getattr(main, "__file__", None) or "").name
    if not script and "-m" in sys.orig_argv:  # the module's package is imported before it becomes main
        return sys.orig_argv[sys.orig_argv.index("-m") + 1] in modules
    return any(point.module in modules for point in entry_points(group="console_scripts", name=script))

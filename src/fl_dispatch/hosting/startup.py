"""The start of a host's plugin in one process: whether it runs and why, and an error that is kept for later.

Hosts call a plugin's entry points in every process and swallow what they raise. So the plugin keeps an error, and
raises it from the next place that its host does not wrap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from ..devices import detect_device
from ..logger_manager import get_logger
from ..settings import Settings, get_settings
from .host_layers import Host


@dataclass
class Startup:
    """The start of one plugin.

    Args:
        plugin: its package.
        host: its host.
        group: of the entry points that name platforms to the host.
        error: the first one that was kept.
        warned: a device that nobody verified has been named.
    """

    plugin: str
    host: Host
    group: str
    error: Exception | None = None
    warned: bool = False

    @property
    def logger(self) -> logging.Logger:
        """The plugin's."""
        return get_logger(f"{self.plugin}.startup")

    def decide(self, judge: Callable[[Settings], tuple[bool, str]]) -> bool:
        """Whether the plugin runs, which the log says with the reason.

        Args:
            judge: the plugin's own answer and reason, for a device that is not left to the host.
        """
        device, settings = detect_device(), get_settings()
        left = device.left_to_host.get(self.host.name)  # why the device, and not the user, keeps it from running
        active, reason = judge(settings) if left is None else (False, f"device '{device.name}' is not served: {left}")
        level = logging.INFO if left is None else logging.WARNING
        self.logger.log(level, "%s is %s: %s", self.plugin, "active" if active else "not active", reason)
        return active

    def reason(self, state: str = "") -> str:
        """The reason of a plugin that runs: this machine's device, and platforms that others have installed."""
        device, own = detect_device(), f"{self.plugin}:"
        others = [entry.name for entry in entry_points(group=self.group) if not entry.value.startswith(own)]
        beside = f"; also installed, and only one may be active: {', '.join(others)}" if others else ""
        return f"device '{device.name}' ({device.device_name(0)}){state}{beside}"

    def warn_of_unverified_device(self) -> None:
        """One WARNING where nobody has verified this machine's device under the host."""
        if not self.warned and (reason := detect_device().unverified(self.host.name)):
            self.warned = True
            self.logger.warning("%s: compare tokens before you rely on it (docs/chips.md)", reason)

    def keep(self, error: Exception) -> None:
        """Keep what an entry point found wrong, unless something has been found before."""
        if self.error is None:
            self.error = error

    def raise_kept(self) -> None:
        """Raise what an entry point found wrong."""
        if self.error is not None:
            raise self.error.with_traceback(None)

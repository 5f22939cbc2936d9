"""The policy outside policy contexts: read from the settings, until a program sets one."""

from __future__ import annotations

from .locking import writers
from .settings import get_settings
from .settings.selection_policy import SelectionPolicy


class GlobalPolicy:
    """One policy a process.

    Attributes:
        epoch: a number that grows with every change.
        from_settings: whether the policy comes from the settings, because no program has set one.
    """

    def __init__(self) -> None:
        self._policy: SelectionPolicy | None = None
        self.epoch = 0
        self.from_settings = True

    def get(self) -> SelectionPolicy:
        """Return the policy, read from the settings if none was set.

        Raises:
            ConfigError: the settings are wrong.
        """
        policy = self._policy
        if policy is None:
            with writers:
                policy = self._policy = self._policy or get_settings().policy
        return policy

    def replace(self, policy: SelectionPolicy | None) -> tuple[SelectionPolicy | None, bool]:
        """Set a policy, or let the settings decide with ``None``; return the argument for :meth:`restore`."""
        with writers:
            before = self._policy, self.from_settings
            self._policy, self.from_settings = policy, policy is None
            self.epoch += 1
        return before

    def restore(self, before: tuple[SelectionPolicy | None, bool]) -> None:
        """Undo a :meth:`replace`."""
        with writers:
            self._policy, self.from_settings = before


GLOBAL = GlobalPolicy()

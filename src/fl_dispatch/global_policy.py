"""The policy that holds outside contexts: read from the settings, until a program sets one."""

from __future__ import annotations

from .locking import writers
from .settings import get_settings
from .settings.selection_policy import SelectionPolicy


class GlobalPolicy:
    """One policy a process.

    Attributes:
        epoch: grows with every change.
        from_settings: no program has set a policy.
    """

    def __init__(self) -> None:
        self._policy: SelectionPolicy | None = None
        self.epoch = 0
        self.from_settings = True

    def get(self) -> SelectionPolicy:
        """The policy; read from the settings when none was set.

        Raises:
            ConfigError: the settings are wrong.
        """
        policy = self._policy
        if policy is None:
            with writers:
                policy = self._policy = self._policy or get_settings().policy
        return policy

    def replace(self, policy: SelectionPolicy | None) -> tuple[SelectionPolicy | None, bool]:
        """Set a policy, or with ``None`` let the settings decide; returns what :meth:`restore` takes."""
        with writers:
            before = self._policy, self.from_settings
            self._policy, self.from_settings = policy, policy is None
            self.epoch += 1
        return before

    def restore(self, before: tuple[SelectionPolicy | None, bool]) -> None:
        """Take a change back."""
        with writers:
            self._policy, self.from_settings = before


GLOBAL = GlobalPolicy()

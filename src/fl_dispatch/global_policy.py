"""The policy that holds where no context does: read from the settings, until somebody sets one."""

from __future__ import annotations

from types import MappingProxyType

from .locking import writers
from .selection.selection_policy import SelectionPolicy
from .settings import Settings, get_settings

RENAMED = {"flaggems_allow": "flagos_whitelist", "flaggems_deny": "flagos_blacklist", "reference_only": "enabled"}
"""Fields of the policy that the settings call otherwise."""


def policy_from_settings(settings: Settings) -> SelectionPolicy:
    """The policy that the user's settings ask for."""
    names = [name for name in SelectionPolicy.__dataclass_fields__ if name != "origins"]
    values = {name: getattr(settings, RENAMED.get(name, name)) for name in names}
    values["reference_only"] = not settings.enabled
    origins = {name: settings.origin(RENAMED.get(name, name)) for name in names}
    origins |= {name: origin for name, origin in settings.origins.items() if name.startswith("per_op_order.")}
    return SelectionPolicy(**values, origins=MappingProxyType(origins))


class GlobalPolicy:
    """One policy a process.

    Attributes:
        epoch: grows with every change.
        from_settings: nobody has set a policy.
    """

    def __init__(self) -> None:
        self._policy: SelectionPolicy | None = None
        self.epoch = 0
        self.from_settings = True

    def get(self) -> SelectionPolicy:
        """The policy; read from the settings when nobody set one.

        Raises:
            ConfigError: the settings are wrong.
        """
        policy = self._policy
        if policy is None:
            with writers:
                policy = self._policy = self._policy or policy_from_settings(get_settings())
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

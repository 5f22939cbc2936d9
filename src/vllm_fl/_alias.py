"""``vllm_fl.dispatch`` is ``fl_dispatch`` under a second name: the same module objects, however they are imported.

An entry in ``sys.modules`` is not enough, because a submodule would be loaded again under the other name, with separate
classes. So a finder before Python's own maps every name, and its loader returns the real module. The files in
``vllm_fl/dispatch/`` are never executed: they exist for type checkers and editors.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType


class AliasFinder(MetaPathFinder):
    """The finder of modules below ``alias``: each is the module of the same name below ``real``."""

    def __init__(self, alias: str, real: str) -> None:
        self.alias, self.real = alias, real

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an alias; ``None`` for any other name, or if there is no real module."""
        if fullname != self.alias and not fullname.startswith(f"{self.alias}."):
            return None
        real = importlib.util.find_spec(self.real + fullname.removeprefix(self.alias))
        if real is None:
            return None
        spec = ModuleSpec(fullname, _Loader(real), origin=real.origin)
        spec.submodule_search_locations = real.submodule_search_locations
        return spec


class _Loader(InspectLoader):
    """Loader of an alias that imports the real module."""

    def __init__(self, real: ModuleSpec) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._real.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._real  # the import system has set the alias's spec there

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code, which ``python -m`` needs."""
        loader = self._real.loader
        return loader.get_code(self._real.name) if isinstance(loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        loader = self._real.loader
        return loader.get_source(self._real.name) if isinstance(loader, InspectLoader) else None


def install(alias: str, real: str) -> None:
    """Make ``alias`` a second name of the package ``real``. A second call does nothing."""
    if not any(getattr(finder, "alias", None) == alias for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder(alias, real))

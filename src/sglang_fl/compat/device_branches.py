"""Disable SGLang's own code for a served device: its modules ask a function at import, not the platform.

That code needs SGLang's kernels for the device. So under the plugin the function returns no from the first import on
that finds it: SGLang asks for platforms while the function's module is being imported, and most of its modules call the
function during their import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from fl_dispatch.devices import DeviceSpec, device_specs

from ..host import HOST


def _no() -> bool:
    return False


class _Answer:
    """A module finder that finds nothing: it replaces a function's code as soon as the function exists.

    It replaces the code and not the name, because modules bind the function.
    """

    def __init__(self, question: str) -> None:
        self.module, self.name = question.split(":")

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        question = getattr(sys.modules.get(self.module), self.name, None)
        if question is not None:
            sys.meta_path.remove(self)
            question.__wrapped__.__code__ = _no.__code__  # below its cache
            question.cache_clear()


def leave(device: DeviceSpec) -> None:
    """Make the host's questions about the device (:attr:`DeviceSpec.host_questions`) return no.

    SGLang means any device of a PyTorch type, so a package's chip shares the questions of its type.
    """
    alike = [spec for spec in device_specs() if spec.torch_type == device.torch_type]
    for question in {spec.host_questions[HOST.name] for spec in alike if HOST.name in spec.host_questions}:
        sys.meta_path.insert(0, _Answer(question))

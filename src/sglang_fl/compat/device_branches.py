"""SGLang's own code for a device that the plugin serves: at import of each module it asks a function, not the platform.

That code needs SGLang's kernels for the device. So under the plugin the function says no, from the first import on that
finds it: SGLang asks for platforms while the function's own module is being imported, and most of its modules ask the
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
    """A finder of modules that finds none: it exchanges a function's code as soon as that is there.

    The code and not the name, because modules bind the function.
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
    """Let the questions about the device (:attr:`DeviceSpec.host_questions`) be answered with no.

    SGLang means any device of a PyTorch type, so a package's chip has the questions of the others of its type.
    """
    alike = [spec for spec in device_specs() if spec.torch_type == device.torch_type]
    for question in {spec.host_questions[HOST.name] for spec in alike if HOST.name in spec.host_questions}:
        sys.meta_path.insert(0, _Answer(question))

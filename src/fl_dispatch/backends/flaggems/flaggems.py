"""FlagGems as a backend class at the path that the specification gives; :mod:`.register_ops` registers its rows."""

from __future__ import annotations

from fl_dispatch.backends.base import Backend
from fl_dispatch.backends.rows import implementations

from . import library
from .register_ops import ROWS


class FlagGemsBackend(Backend):
    """FlagGems, if it is installed (``pip install --no-deps flag-gems``, because it pins an old NumPy)."""

    name = "flaggems"

    def is_available(self) -> bool:
        """Whether FlagGems is installed and the machine has a GPU."""
        return not self.why_unavailable()

    def why_unavailable(self) -> str:
        """Return why not."""
        return library.why_unavailable()


for _impl in implementations(ROWS, __package__):
    setattr(FlagGemsBackend, _impl.op_name, staticmethod(_impl.fn))

"""The backend class of the template."""

from __future__ import annotations

import os

from fl_dispatch.backends.base import Backend


class TemplateBackend(Backend):
    """Kernels of a chip, in this template plain PyTorch."""

    @property
    def name(self) -> str:
        """The backend's name."""
        return "template"

    @property
    def vendor(self) -> str:
        """The name that policies use, as in ``vendor:template``."""
        return "template"

    def is_available(self) -> bool:
        """Replace by a check for the vendor's library or device file that creates no device context.

        For instance ``importlib.util.find_spec("torch_vendor") is not None``. The template reads a
        variable, so that it never runs by accident.
        """
        return os.environ.get("FL_DISPATCH_TEMPLATE") == "1"

    def why_unavailable(self) -> str:
        """Say what is missing; ``fl explain`` prints the message."""
        return "the template runs with FL_DISPATCH_TEMPLATE=1 only"

    # One method for each operator with a kernel on the chip, with the declared name and parameters. Delete the other
    # methods: missing operators fall back. Late imports keep the vendor's library out of processes that never use it.

    def silu_and_mul(self, x):  # type: ignore[no-untyped-def]  # annotations are welcome, but not needed
        """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
        from .impl.activation import silu_and_mul_template

        return silu_and_mul_template(x)

    def rms_norm(self, x, residual=None, weight=None, epsilon=1e-6):  # type: ignore[no-untyped-def]
        """See :data:`fl_dispatch.ops.normalization.rms_norm`."""
        from .impl.normalization import rms_norm_template

        return rms_norm_template(x, residual, weight, epsilon)

"""The protocol between this core and packages of backends and devices, and the versions of it that are served.

A package states its version by an entry point of the group ``fl_dispatch.api``, for example ``acme =
"fl_dispatch.api:V1"``. It is metadata, so a package for another core is refused before any of it is imported. A package
without it is taken as one for the first version.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint

from .version import __version__

API_GROUP = "fl_dispatch.api"
V1 = 1
"""The first version: registration by ``register_builtins(registry)``, ``OpImpl``, ``Backend`` and ``DeviceSpec``."""
SERVED = range(V1, V1 + 1)
"""Versions that this core serves; a version ends here when what it promises is gone."""


def why_refused(point: EntryPoint) -> str:
    """The sentence that refuses the package of an entry point; empty if its version is served."""
    package = point.dist
    if package is None:
        return ""
    for stated in package.entry_points.select(group=API_GROUP):
        number = stated.attr.removeprefix("V")
        if not number.isdecimal():
            shown = f"{stated.value!r} is not {API_GROUP}:V1"
            return f"{package.name} {package.version} states no version of the API: {shown}"
        if int(number) not in SERVED:
            served = " to ".join(dict.fromkeys((str(SERVED.start), str(SERVED.stop - 1))))
            way = "install a newer fl-dispatch" if int(number) >= SERVED.stop else "install a newer one of it"
            return (
                f"{package.name} {package.version} is built for version {number} of the API for backends, "
                f"fl-dispatch {__version__} serves {served}: {way}"
            )
    return ""

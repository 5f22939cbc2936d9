"""Versions of the protocol between this core and packages of backends and devices.

A package states its version by an entry point of the group ``fl_dispatch.api``, for example ``acme =
"fl_dispatch.api:V1"``. An entry point is metadata, so a package for another core is refused before any of its code is
imported. A package without the entry point is taken as one for the first version.
"""

from __future__ import annotations

from importlib.metadata import Distribution, EntryPoint, entry_points

from .version import __version__

API_GROUP = "fl_dispatch.api"
V1 = 1
"""The first version: registration by ``register_builtins(registry)``, ``OpImpl``, ``Backend`` and ``DeviceSpec``."""
SERVED = range(V1, V1 + 1)
"""Versions that this core serves; a version is removed once the core no longer keeps its promises."""


def why_refused(point: EntryPoint) -> str:
    """Return the sentence that refuses the package of an entry point; empty if the core serves its version."""
    return "" if point.dist is None else _why_refused(point.dist)


def why_module_refused(module: str) -> str:
    """Return the sentence that refuses a named module because of its package; empty if no package refuses it."""
    stating = [point.dist for point in entry_points(group=API_GROUP) if point.dist is not None]
    return next((why for package in stating if _has(package, module) and (why := _why_refused(package))), "")


def _has(package: Distribution, module: str) -> bool:
    """Whether an installed package has a module: in its files, or in its top-level names if it is editable."""
    path, files = module.replace(".", "/"), [str(file) for file in package.files or ()]
    if any(file.endswith(".py") and not file.startswith("__editable__") for file in files):
        return any(file.startswith((f"{path}.", f"{path}/")) for file in files)
    named = {point.module.partition(".")[0] for point in package.entry_points if point.group != API_GROUP}
    return module.partition(".")[0] in named.union((package.read_text("top_level.txt") or "").split())


def _why_refused(package: Distribution) -> str:
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

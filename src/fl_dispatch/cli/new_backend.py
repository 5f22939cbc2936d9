"""``fl new-backend``: write a package for a vendor's kernels with tests that pass before the first kernel exists.

The files in ``package`` are :class:`string.Template` texts: ``kernels`` for every package, and ``device`` to extend it
for a chip with its own torch device type.
"""

from __future__ import annotations

import keyword
import pkgutil
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

import torch
import typer

from ..backends import vendor
from ..devices import CPU, device_specs
from ..errors import DispatchError
from ..version import __version__
from .output import console

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
TEMPLATES = files(__package__) / "package"


def new_backend(
    name: Annotated[str, typer.Argument(help="The vendor's name, as in vendor:NAME; the module is NAME_fl.")],
    device: Annotated[
        str | None, typer.Option(help="PyTorch device type of the chip, such as npu; omit it for kernels on a CPU.")
    ] = None,
    path: Annotated[Path | None, typer.Option(help="The folder to create, NAME-fl by default.")] = None,
) -> None:
    """Write a package with a vendor's kernels that is green from the start: kernels in PyTorch, to be replaced.

    It has entry points, tests, a CI workflow and the next steps, and with --device a DeviceSpec with its YAML file.
    Nothing that exists is overwritten.
    """
    written = write_package(name, path, device)
    folder = written[0]
    for file in written[1:]:
        console.print(str(file), highlight=False, markup=False)
    console.print(
        f"\ncd {folder}\npip install -e .\nfl verify --impl vendor.{name}\nfl demo --prefer vendor",
        highlight=False,
        markup=False,
    )


def write_package(name: str, path: Path | None = None, device: str | None = None) -> list[Path]:
    """Write the package.

    Args:
        name: the vendor's name.
        path: the new folder, by default ``NAME-fl`` in the current folder.
        device: the chip's own PyTorch device type, or ``None``.

    Returns:
        The folder, then its files.

    Raises:
        DispatchError: the name, the device type or the folder cannot be used.
    """
    _check_name(name)
    if device is not None:
        _check_device(name, device)
    folder = path or Path(f"{name.replace('_', '-')}-fl")
    if folder.exists():
        raise DispatchError(f"'{folder}' exists; name another folder with --path")
    texts: dict[str, str] = {}
    for part in ("kernels", "device") if device else ("kernels",):
        for place, text in _templates(TEMPLATES / part):
            target = place.replace("module/", f"{name}_fl/").replace("NAME", name)
            texts[target] = texts.get(target, "") + Template(text).substitute(values(name, device))
    for place, text in sorted(texts.items()):
        target_path = folder / place
        target_path.parent.mkdir(parents=True, exist_ok=True)
        target_path.write_text(text, encoding="utf-8")
    return [folder, *(folder / place for place in sorted(texts))]


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise DispatchError(
            f"'{name}' cannot be a vendor's name: small letters, digits and single underscores make one"
        )
    if name in {module.name for module in pkgutil.iter_modules(vendor.__path__)}:
        raise DispatchError(f"the vendor '{name}' has a backend in fl-dispatch; take another name")
    if find_spec(f"{name}_fl") is not None:
        raise DispatchError(f"a module '{name}_fl' is installed here already; take another name")


def _check_device(name: str, device: str) -> None:
    if name in {spec.name for spec in device_specs()}:
        raise DispatchError(f"fl-dispatch or an installed package has a device '{name}': leave --device out, or rename")
    if device == CPU.torch_type:
        raise DispatchError("the CPU is no device of yours: leave --device out, and the kernels take CPU tensors")
    if device in {spec.torch_type for spec in device_specs()}:
        return
    try:
        known = torch.device(device).type == device and device != "meta"
    except RuntimeError:
        known = False
    if not known:
        raise DispatchError(
            f"PyTorch knows no device type '{device}' here; correct it, or install the extension that registers it"
        )


def values(name: str, device: str | None) -> dict[str, str]:
    """Return the text for each ``$word`` of the templates."""
    backends: dict[str, str] = torch.distributed.Backend.default_device_backend_map
    return {
        "name": name,
        "module": f"{name}_fl",
        "distribution": f"{name.replace('_', '-')}-fl",
        "title": name.replace("_", " ").title(),
        "class_name": name.title().replace("_", "") + "Backend",
        "version": __version__,
        "device_types": f'("{device}",)' if device else "None",
        "torch_type": device or "",
        "dispatch_key": _dispatch_key(device) if device else "",
        "dist_backend": backends.get(str(device), "gloo"),
        "extension": repr(_extension(device)).replace("'", '"'),
        "detect": _detection(name, device),
        "runner": f"[self-hosted, {name}]" if device else "ubuntu-latest",
    }


def _dispatch_key(device: str) -> str:
    """Return PyTorch's dispatch key for the type, from a known chip or from PyTorch."""
    known = {spec.torch_type: spec.dispatch_key for spec in device_specs()}
    return known.get(device) or str(torch._C._dispatch_key_for_device(device))


def _extension(device: str | None) -> str | None:
    """Return the package that adds the type to PyTorch: a known chip's, or the usual name."""
    known = {spec.torch_type: spec.extension for spec in device_specs()}
    return known.get(device, f"torch_{device}") if device else None


def _detection(name: str, device: str | None) -> str:
    """Return an expression that detects the chip; several chips may share a type, so the type alone is not enough."""
    counted = "device_count() > 0"
    shared = sum(spec.torch_type == device for spec in device_specs()) > 1
    return f'Path("/dev/{name}0").exists() and {counted}' if shared else counted


def _templates(folder: Traversable, inside: str = "") -> list[tuple[str, str]]:
    """Yield the path and text of each template below a folder."""
    found = []
    for entry in folder.iterdir():
        place = inside + entry.name
        if entry.is_dir():
            found += _templates(entry, f"{place}/")
        elif place.endswith(".in"):
            found.append((place.removesuffix(".in"), entry.read_text(encoding="utf-8")))
    return found

"""Put the emulated NPU into the environment of the interpreter that runs this: the last step of its set-up.

The runtime is compiled by ``cc`` into ``torch_npu.libs``, a folder where the wheel's own libraries look first, so
nobody has to set LD_LIBRARY_PATH. A distribution of one entry point makes ``import torch`` activate the emulation in
every process of the environment, spawned ones too; it links to this folder, so edits need no second installation.
"""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
"""Libraries of the Ascend toolkit, as ``libtorch_npu.so`` names them. One file has all names: one set of counters."""

HERE = Path(__file__).resolve().parent


def install(site_packages: Path) -> None:
    build(site_packages / "torch_npu.libs")
    link(site_packages / HERE.name, HERE)
    distribution = site_packages / "emulated_npu-1.dist-info"
    distribution.mkdir(exist_ok=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-npu\nVersion: 1\n")
    (distribution / "RECORD").write_text("")
    (distribution / "INSTALLER").write_text("make\n")
    # torch imports its backends by this group, and torch_npu's own entry point does no more than import torch_npu.
    (distribution / "entry_points.txt").write_text("[torch.backends]\nemulated_npu = emulated_npu.startup:activate\n")


def build(folder: Path) -> None:
    """Compile the runtime into a folder, under all its names."""
    folder.mkdir(exist_ok=True)
    first, *others = (folder / name for name in LIBRARIES)
    built = folder / "building.so"  # then renamed, because a running process may have the old one open
    command = ["cc", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{first.name}", "-o", built, HERE / "runtime.c"]
    subprocess.run(command, check=True)
    built.replace(first)
    for other in others:
        link(other, Path(first.name))


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


if __name__ == "__main__":
    install(Path(sysconfig.get_path("purelib")))

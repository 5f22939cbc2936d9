"""A sandbox around a process: the kernel refuses network, other processes, and files that are opened for writing.

A system-call filter (seccomp) needs no privilege and cannot be removed. An accelerator's compilers are processes that
write files, so there both stay allowed; these processes end with their group, which they cannot leave.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import struct
from collections.abc import Iterable

ARCHITECTURE = 0xC000003E
X32 = 0x40000000
CLONE, CLONE3, OPEN, OPENAT = 56, 435, 2, 257
CLONE_THREAD = 0x10000
WRITING = 0o3 | 0o100 | 0o1000
"""Flags of a file that is opened for writing, created or truncated."""
NETWORK = (41, 42, 53, 425)
"""socket, connect, socketpair, and io_uring_setup, which opens sockets too."""
OTHERS = (62, 101, 109, 112, 129, 200, 272, 310, 311, 321, 424, 434, 438)
"""kill, ptrace, setpgid, setsid, rt_sigqueueinfo, tkill, unshare, process_vm_readv, process_vm_writev, bpf, pidfds."""
PROCESSES = (57, 58, 59, 322)
"""fork, vfork, execve, execveat."""
FILES = (76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 258, 260, 263, 264, 265, 266, 268, 316, 437)
"""truncate, rename, mkdir, rmdir, creat, link, unlink, symlink, chmod, chown, each in all its forms; openat2."""
ALLOW, REFUSE, UNKNOWN, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
NO_NEW_PRIVILEGES = 38
SECCOMP, FILTER = 317, 1
ALL_THREADS = 1
"""The flag that filters threads that ran before, such as a driver's."""
LOAD, EQUAL, NOT_LESS, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, MACHINE, ARGUMENTS = 0, 4, 16


def why_unavailable() -> str:
    """Return why no sandbox can be installed here, or empty."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        return ""
    return f"the sandbox is of Linux on x86-64, not of {platform.system()} on {platform.machine()}"


def enter(compilers: bool) -> None:
    """Install the sandbox around this process, permanently.

    Args:
        compilers: whether other processes and files stay allowed.

    Raises:
        OSError: the kernel does not take the filter.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    refused = NETWORK + OTHERS + (() if compilers else PROCESSES + FILES)
    program = _program(refused, compilers)
    libc = ctypes.CDLL(None, use_errno=True)
    text = ctypes.create_string_buffer(program)

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_void_p))

    given = Filter(len(program) // 8, ctypes.cast(text, ctypes.c_void_p).value)
    numbers = map(ctypes.c_long, (SECCOMP, FILTER, ALL_THREADS))
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(*numbers, ctypes.byref(given)):
        raise OSError(ctypes.get_errno(), "the kernel does not take a filter of system calls")


def _program(refused: Iterable[int], compilers: bool) -> bytes:
    """Return the filter as a BPF program."""
    lines = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, ARCHITECTURE), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    lines += [(NOT_LESS, 0, 1, X32), (RETURN, 0, 0, REFUSE)]
    for number in refused:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    if not compilers:
        lines += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, UNKNOWN)]  # its flags are in memory; clone's are an argument
        lines += [(EQUAL, 0, 4, CLONE), (LOAD, 0, 0, ARGUMENTS), (ANY_BIT, 1, 0, CLONE_THREAD)]
        lines += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
        for number, argument in ((OPEN, 1), (OPENAT, 2)):
            lines += [(EQUAL, 0, 4, number), (LOAD, 0, 0, ARGUMENTS + 8 * argument), (ANY_BIT, 0, 1, WRITING)]
            lines += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)

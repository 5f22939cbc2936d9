"""Memory of packed weights that moves to a disk: every reader and writer finds what it would have found in memory."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from fl_dispatch import native, weight_forms
from fl_dispatch.backends.vendor.cpu.impl import linear
from fl_dispatch.hosting.memory import heap, paging
from fl_dispatch.hosting.memory.paging import MIB, PAGE

pytestmark = [
    pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="the C library is not glibc"),
    pytest.mark.skipif(bool(why := linear.why_no_onednn()), reason=why or "-"),
]
SHAPES = [(1537, 1031), (2048, 1024), (4099, 523)]  # two are no multiples of any block
WIDTH = 1031


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    assert heap.map_buffers()
    held = [torch.empty(MIB, dtype=torch.uint8)]  # free places that earlier tests left in the heap, so none is taken
    while not paging._is_mapped_alone(held[-1].data_ptr(), MIB) and len(held) < 8192:
        held.append(torch.empty(MIB, dtype=torch.uint8))
    yield
    ctypes.CDLL(None).mallopt(heap._MMAP_THRESHOLD, 32 * MIB)  # the largest that glibc chooses by itself


def packed(dtype: torch.dtype = torch.float32, shape: tuple[int, int] = (1537, WIDTH)) -> Tensor:
    """A declared weight of random bits, with infinities, several NaN and both zeros, that a product has packed."""
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    bits = torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max, shape, dtype=kind)
    weight = bits.view(dtype).clone()
    weight_forms.declare(weight)
    assert weight_forms.of(weight, "copy", lambda now, before: now.clone()) is not None
    return weight


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


def resident(weight: Tensor) -> int:
    """The bytes of a weight's memory that this process has, file or not."""
    (address,) = native.addresses([weight])
    assert address is not None
    begin, pages = address // PAGE, weight.nbytes // PAGE
    entries = numpy.fromfile("/proc/self/pagemap", numpy.uint64, pages, offset=begin * 8)
    return int((entries >> numpy.uint64(63)).sum()) * PAGE


def through_a_system_call(weight: Tensor) -> Tensor:
    (address,) = native.addresses([weight])
    read, write = os.pipe()
    found = bytearray()
    data = (ctypes.c_char * weight.nbytes).from_address(address or 0)
    while len(found) < weight.nbytes:
        os.write(write, memoryview(data)[len(found) : len(found) + PAGE])
        found += os.read(read, PAGE)
    os.close(read), os.close(write)
    return torch.frombuffer(found, dtype=weight.dtype).view(weight.shape)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "PyTorch": lambda weight: weight.clone(),
    "NumPy": lambda weight: torch.from_numpy(bits(weight).numpy().copy()).view(weight.dtype),
    "an address": lambda weight: torch.frombuffer(
        bytearray(ctypes.string_at(weight.data_ptr(), weight.nbytes)), dtype=weight.dtype
    ).view(weight.shape),
    "a system call": through_a_system_call,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_reader_finds_every_bit(
    dtype: torch.dtype, shape: tuple[int, int], read: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    weight = packed(dtype, shape)
    wanted = bits(weight).clone()
    assert paging.page_out([weight], tmp_path) >= weight.nbytes - 2 * PAGE
    assert resident(weight) <= 2 * PAGE
    assert torch.equal(bits(read(weight)), wanted)
    assert resident(weight) >= weight.nbytes - 2 * PAGE, "it was read where it was"
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_the_tensor_stays_marked_so_that_its_form_is_kept_until_someone_writes(tmp_path: Path) -> None:
    weight = packed()
    forms = weight_forms.declare(weight)
    paging.page_out([weight], tmp_path)
    assert weight_forms.rests(weight)
    for made in (1, 2):
        form = weight_forms.of(weight, "copy", forms.makers["copy"])
        assert torch.equal(bits(form), bits(weight))
        assert forms.times == made
        weight.data[5:9].fill_(made)
    assert paging.page_out([weight], tmp_path) == 0, "it was written and is not packed again yet"


@pytest.mark.parametrize("taken", ["before", "after"])
def test_a_write_through_an_address_is_kept_when_pages_move_again(taken: str, tmp_path: Path) -> None:
    weight = packed()
    address = weight.data_ptr() if taken == "before" else 0
    weight_forms.of(weight, "copy", weight_forms.declare(weight).makers["copy"])
    for value in (3.0, 5.0):
        assert paging.page_out([weight], tmp_path) > 0
        at = address or native.addresses([weight])[0]
        (ctypes.c_float * WIDTH).from_address(at + 700 * WIDTH * 4)[:] = [value] * WIDTH
        assert weight[700].eq(value).all()
        assert not weight[701].eq(value).any()
    weight_forms.weights_were_written([weight])
    form: Any = weight_forms.of(weight, "copy", weight_forms.declare(weight).makers["copy"])
    assert form[700].eq(5.0).all()


def test_memory_that_is_freed_and_taken_again_is_clear(tmp_path: Path) -> None:
    weight = packed()
    shape = weight.shape
    assert paging.page_out([weight], tmp_path) > 0
    weight.untyped_storage().resize_(0)  # as a sleeping engine does
    assert all(torch.zeros(shape).eq(0.0).all() for _ in range(4))


def test_a_child_process_has_its_own_pages(tmp_path: Path) -> None:
    weight = packed()
    wanted = bits(weight).clone()
    paging.page_out([weight], tmp_path)
    if (child := os.fork()) == 0:
        ctypes.memset(native.addresses([weight])[0] or 0, 0, weight.nbytes)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(bits(weight), wanted)


def _shared() -> Tensor:
    return packed().share_memory_()


def _without_a_form() -> Tensor:
    weight = torch.ones(1537, WIDTH)
    weight_forms.declare(weight)
    weight_forms.of(weight, "none", lambda now, before: None)
    return weight


def _in_the_heap() -> Tensor:
    return packed(shape=(512, 255))  # less than a MiB


@pytest.mark.parametrize("make", [_shared, _without_a_form, _in_the_heap, lambda: torch.ones(1537, WIDTH)])
def test_other_memory_stays(make: Callable[[], Tensor], tmp_path: Path) -> None:
    weight = make()
    assert paging.page_out([weight], tmp_path) == 0
    assert resident(weight) >= weight.nbytes - 2 * PAGE


def test_a_header_that_glibc_did_not_write_is_not_taken_for_one() -> None:
    memory = (ctypes.c_size_t * (4 * PAGE))()
    start = -(-ctypes.addressof(memory) // PAGE) * PAGE
    address, size = start + 64, 2 * PAGE
    assert not paging._is_mapped_alone(start, size)
    for before, header, fits in [
        (48, 3 * PAGE - 48 | 2, True),
        (48, 3 * PAGE - 48 | 3, False),
        (48, 3 * PAGE - 48, False),
        (48, 3 * PAGE - 32 | 2, False),
        (32, 3 * PAGE - 32 | 2, False),
        (48, 2 * PAGE - 48 | 2, False),
        (48, 6 * PAGE - 48 | 2, False),
    ]:
        for words, value in ((2, before), (1, header)):
            ctypes.c_size_t.from_address(address - 8 * words).value = value
        assert paging._is_mapped_alone(address, size) is fits


def _no_space(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(paging.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": MIB}))


def _pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(paging, "_pinned", lambda: "8 kB")


def _full_while_writing(patch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(paging.os, "fsync", fail)


def _changed_by_the_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(paging.os, "fsync", lambda descriptor: os.pwrite(descriptor, b"wrong", 5 * PAGE))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_no_space, "1 MiB are free"),
        (_pinned, "8 kB of this process are pinned"),
        (_full_while_writing, "No space left"),
        (_changed_by_the_disk, "has other contents than were written"),
    ],
)
def test_a_disk_that_fails_leaves_the_weights_in_memory_and_the_log_says_why(
    spoil: Callable[[pytest.MonkeyPatch], None],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = packed()
    wanted = bits(weight).clone()
    with monkeypatch.context() as patch, caplog.at_level("WARNING", "fl_dispatch"):
        spoil(patch)
        assert paging.page_out([weight], tmp_path) == 0
    assert says in caplog.text
    assert resident(weight) >= weight.nbytes - 2 * PAGE
    assert torch.equal(bits(weight), wanted)


def test_pinned_memory_is_counted() -> None:
    assert paging._pinned() == "0 kB"


def test_a_folder_in_memory_or_without_permission_is_refused(tmp_path: Path) -> None:
    paging.check(tmp_path)
    with pytest.raises(ValueError, match="VLLM_FL_PAGE_OUT: /dev/shm is in main memory"):
        paging.check(Path("/dev/shm"))
    with pytest.raises(ValueError, match="is no folder that can be written"):
        paging.check(tmp_path / "absent")


CHECKED_IN_LAYERS = """
for name in base upper work merged; do mkdir "$1/$name"; done
mount -t overlay overlay -o "lowerdir=$1/base,upperdir=$1/upper,workdir=$1/work" "$1/merged" && echo mounted || exit
exec "$2" -c 'import sys; from pathlib import Path; from fl_dispatch.hosting.memory import paging
paging.check(Path(sys.argv[1]))' "$1/merged"
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="this system mounts no layers: it has no unshare")
def test_layers_of_a_container_are_in_memory_if_the_writable_one_is(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for folder, says in ((str(tmp_path), ""), (memory, "is in main memory")):
            command = ["unshare", "--mount", "--map-root-user", "sh", "-c", CHECKED_IN_LAYERS, "sh", folder]
            checked = subprocess.run([*command, sys.executable], check=False, capture_output=True, text=True)
            if "mounted" not in checked.stdout:
                pytest.skip(f"this system mounts no layers: {checked.stderr.strip()}")
            assert says in checked.stderr
            assert (checked.returncode == 0) == (says == "")


def test_a_system_that_calls_everything_resident_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = paging._system

    def says_all(name: str, *arguments: int) -> int:
        if name != "mincore":
            return call(name, *arguments)
        ctypes.memset(arguments[2], 1, arguments[1] // PAGE)
        return 0

    monkeypatch.setattr(paging, "_system", says_all)
    paging.check(tmp_path)

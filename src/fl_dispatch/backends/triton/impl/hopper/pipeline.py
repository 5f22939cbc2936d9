"""The kernels' pipeline: rings of shared-memory buffers between warps that load and warps that multiply.

A producer acquires a buffer, starts its copies, and publishes the buffer when they are complete; a consumer waits for
the buffer, reads and releases it. ``docs/evidence/hopper.md`` shows which warps wait for which.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .aggregates import aggregate

CONSUMERS = gl.constexpr(2)
"""Groups of four warps that multiply. In prefill a buffer is free when each of them has released it."""
CONSUMER_REGISTERS = gl.constexpr(216)
"""Registers of a consumer's thread: threads of two consumers and a producer share 504 registers."""
PRODUCER_REGISTERS = gl.constexpr(72)
"""Registers of a producer's thread. Two producers of two warps, as in latent decode, count as one of four."""


@gluon.jit
def barriers(NUMBER: gl.constexpr):
    """Allocate barriers, which are still to be initialized with the arrivals that end a phase."""
    return gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())


@gluon.jit
def buffers(dtype: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate tiles as the tensor cores read them."""
    return gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], gl.NVMMASharedLayout(128, 8 * dtype.itemsize, 2))


@aggregate
class Tile:
    """Rows in shared memory, split after a power of two of columns; ``rest`` is ``main`` if no columns are left."""

    main: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor


@aggregate
class Ring:
    """Buffers that are filled in turn: tile ``i`` takes stage ``i % stages``, for the ``i // stages``-th time.

    Each stage has two barriers: ``full`` passes it to the consumers, ``free`` back to the producer. Rings may share an
    array of ``full`` barriers; those of this ring begin at ``offset``, so one number names the stage that a producer
    publishes next.
    """

    main: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    offset: gl.constexpr
    stages: gl.constexpr

    @gluon.jit
    def tile(self, stage):
        """Return the buffers of a stage."""
        return Tile(self.main.index(stage), self.rest.index(stage))

    @gluon.jit
    def acquire(self, i):
        """Producer: wait until the consumers have released the stage's former tile; does not wait for the first one."""
        mbarrier.wait(self.free.index(i % self.stages), ((i // self.stages) & 1) ^ 1)

    @gluon.jit
    def acquire_stage(self, stage, phase):
        """Producer of one stage alone: as :meth:`acquire`; ``phase`` begins with 1 and alternates."""
        mbarrier.wait(self.free.index(stage), phase)

    @gluon.jit
    def wait(self, i):
        """Consumer: wait until tile ``i`` is published."""
        mbarrier.wait(self.full.index(self.offset + i % self.stages), (i // self.stages) & 1)

    @gluon.jit
    def wait_stage(self, stage, phase):
        """Consumer of a stage with a separate producer: as :meth:`wait`; ``phase`` begins with 0 and alternates."""
        mbarrier.wait(self.full.index(stage), phase)

    @gluon.jit
    def wait_if_any(self, i, left):
        """Consumer: wait until tile ``i`` is published, if ``left``, the number of tiles still to come, is not 0."""
        barrier = self.full.index(self.offset + i % self.stages)
        mbarrier.wait(barrier, (i // self.stages) & 1, pred=left > 0)

    @gluon.jit
    def release(self, stage):
        """Consumer: give the stage back, after the products that read it."""
        mbarrier.arrive(self.free.index(stage))

    @gluon.jit
    def wait_released(self, i, pred):
        """Producer: wait until the consumers have released tile ``i``; no other tile has taken its stage since."""
        mbarrier.wait(self.free.index(i % self.stages), (i // self.stages) & 1, pred=pred)


@gluon.jit
def publish(full, index, LATER: gl.constexpr):
    """Producer: wait for all groups of copies but the last ``LATER``, then tell the consumers that a stage is full.

    The fence makes the copies visible to the tensor cores, so consumers need none. Index -1 means no stage.
    """
    async_copy.wait_group(LATER)
    fence_async_shared()
    mbarrier.arrive(full.index(gl.maximum(index, 0)), pred=index >= 0)


@gluon.jit
def commit(full, pending, index):
    """Producer: close the group of copies into stage ``index``, and publish ``pending``, the stage before it (or -1).

    A stage is therefore published while the copies into the next one run. Returns the new ``pending``.
    """
    async_copy.commit_group()
    publish(full, pending, 1)
    return pending * 0 + index


@gluon.jit
def drain(full, pending):
    """Producer: publish the last stage. Returns the new ``pending``."""
    publish(full, pending, 0)
    return pending * 0 - 1

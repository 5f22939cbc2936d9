"""Links from device to device: NCCL's functions, wires over a library, and the thread that uses a wire."""

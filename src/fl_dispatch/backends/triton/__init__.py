"""Our own Triton kernels: plain Triton, for every chip that has a Triton compiler."""

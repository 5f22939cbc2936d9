"""This project's kernels in plain Triton, for every chip that has a Triton compiler."""

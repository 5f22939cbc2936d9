"""The kernels, one family a file, each beside the function that launches it."""

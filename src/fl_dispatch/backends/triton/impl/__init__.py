"""The kernels, one folder a family, each next to the function that launches it."""

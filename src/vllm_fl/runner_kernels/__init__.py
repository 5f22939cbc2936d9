"""Forms of the Triton kernels of vLLM's V2 model runner, for devices without a Triton driver: PyTorch, and C++ on CPUs.

vLLM launches a form without the grid, so a form reads the number of rows from its arguments, and ignores block sizes
(see :mod:`.launch`). Each is compared with its kernel in Triton's interpreter
(``tests/vllm/worker/test_runner_kernels.py``).
"""

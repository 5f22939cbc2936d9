"""Forms of the Triton kernels of vLLM's V2 model runner on main memory, where Triton has no driver.

They are PyTorch's operators. Kernels of every step work on a few numbers a request, for which a call of PyTorch costs
more than its work: their forms are NumPy's operators on the same memory.

vLLM launches a form as it launches the kernel, with the same arguments and without the grid (see
``vllm.triton_utils.dispatcher``), so a form takes the number of rows from its arguments, and ignores sizes of blocks.
Each is compared with its kernel in Triton's interpreter (``tests/vllm/test_runner_kernels.py``).
"""

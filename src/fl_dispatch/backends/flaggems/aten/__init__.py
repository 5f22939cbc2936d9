"""ATen replacement: FlagGems' kernels instead of PyTorch's own operators, in one process.

:mod:`.decision` decides whether to replace operators, and :mod:`.names` selects them. :mod:`.check` compares a kernel's
results, :mod:`.guard` chooses the kernel for each call, and :mod:`.replacement` installs the guards. Only
:mod:`.replacement` imports FlagGems.
"""

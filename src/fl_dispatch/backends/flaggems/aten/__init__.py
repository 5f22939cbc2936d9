"""ATen replacement: FlagGems' kernels in the place of PyTorch's own operators, in one process.

:mod:`.decision` decides whether, and :mod:`.names` for which operators. :mod:`.check` compares a kernel's results,
:mod:`.guard` chooses the kernel of a call, and :mod:`.replacement` puts all in place. Only the last imports FlagGems.
"""

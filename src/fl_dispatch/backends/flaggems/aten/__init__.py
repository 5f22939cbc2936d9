"""ATen replacement: FlagGems' kernels in the place of PyTorch's own operators, in one process.

:mod:`.decision` says whether, :mod:`.names` which operators, :mod:`.check` whether a kernel is right, :mod:`.slot` what
is registered in PyTorch's dispatcher, :mod:`.guard` whose kernel runs in a call, and :mod:`.replacement` puts all in
place. Only the last imports FlagGems.
"""

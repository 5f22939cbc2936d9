"""Makes an installed torchvision importable beside a PyTorch without CUDA. Run by the Makefile in each environment.

SGLang imports torchvision, and so do the processors of pictures that vLLM uses. Its wheel for the general public is
compiled against PyTorch with CUDA, so beside a CPU build of PyTorch its library does not load, its operators do not
exist, and its Python code fails when it describes them to PyTorch. This puts that one module's registrations behind the
question whether the operators are there. Nothing changes where torchvision and PyTorch fit together, as they do on a
machine where pip installed both.

    python tools/torchvision_without_operators.py
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PLAIN = '@torch.library.register_fake("torchvision::'
GUARDED = (
    '@(torch.library.register_fake if torchvision.extension._has_ops() else lambda name: lambda f: f)("torchvision::'
)


def main() -> None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        sys.exit("torchvision is not installed here")
    file = Path(spec.origin).with_name("_meta_registrations.py")
    text = file.read_text(encoding="utf-8")
    if GUARDED not in text:
        if PLAIN not in text:
            sys.exit(f"{file} has changed: nothing to guard is found")
        file.unlink()  # it may be one file with that of an installer's cache
        file.write_text(text.replace(PLAIN, GUARDED), encoding="utf-8")


if __name__ == "__main__":
    main()

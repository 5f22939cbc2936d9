"""The search for the operator, layers and implementation that make a model's logits wrong: ``fl bisect``.

No host is known here. ``search`` is pure; ``scores`` and ``yardstick`` judge what engines answer; ``choices`` and
``documents`` turn what a policy decided into policies between two; ``inside`` runs in an engine's processes.
:mod:`fl_dispatch.cli.bisect` starts the engines.
"""

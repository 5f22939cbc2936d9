"""The search for the operator, layers and implementation that make a model's logits wrong: ``fl bisect``.

This package knows no host. ``search`` is pure; ``scores`` and ``yardstick`` judge engines' answers; ``choices`` and
``documents`` turn a policy's decisions into policies between two; ``inside`` runs in an engine's processes.
:mod:`fl_dispatch.cli.bisect` starts the engines.
"""

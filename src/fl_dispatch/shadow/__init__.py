"""Shadow mode: a share of live calls also runs through a second implementation.

The core knows only a wrapper that may stand before an implementation (:attr:`.state.State.wrapper`).
"""

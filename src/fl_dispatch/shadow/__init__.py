"""Shadow mode: a share of live calls also runs through a second implementation.

The core knows only a wrapper that may stand before an implementation (:attr:`fl_dispatch.state.State.wrapper`).
"""

"""Shadow mode: a share of the live calls runs through a second implementation too.

The core does without it: it lets one function stand before an implementation (:attr:`.state.State.wrapper`), and no
more.
"""

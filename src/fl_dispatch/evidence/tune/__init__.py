"""Search for the fastest implementations here, for the calls of one model, among those proven right.

``model`` reads a model's dimensions, ``calls`` lists its layers' calls, ``late_compilation`` and ``race`` find the
candidates and their times. ``choice`` and ``rules`` turn times into rules; ``record`` and ``document`` keep the figures
and write the file.
"""

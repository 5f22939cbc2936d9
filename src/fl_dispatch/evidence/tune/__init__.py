"""Which implementation is fastest here, for the calls that a model makes, among those that are proven right.

``model`` reads a model's dimensions, ``calls`` says what its layers call, ``warmth`` and ``race`` find who may win and
how fast each is, ``choice`` and ``rules`` make rules of it, ``record`` and ``document`` keep the figures and write the
file.
"""

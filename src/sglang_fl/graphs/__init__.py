"""Graphs of decoding and of prompts, and what must be warm before they are captured."""

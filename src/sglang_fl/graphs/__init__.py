"""Graphs of decoding and of prompts, and the warm-up before they are captured."""

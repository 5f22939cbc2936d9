"""Compiled models and graphs: the passes that fuse operators, and graphs of one token and of prompts."""

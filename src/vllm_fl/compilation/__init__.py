"""Compiled models and graphs: the passes that join operators, and graphs of one token and of prompts."""

"""Formats of tool calls and reasoning, one file per model family; registry.py above lists them."""

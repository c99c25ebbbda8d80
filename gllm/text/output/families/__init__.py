"""Formats of tool calls, one file per model family; registry.py above lists them."""

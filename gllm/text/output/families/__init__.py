"""Formats of tool calls and reasoning tags: one file per model family."""

"""Parsers of chat output: reasoning sections and tool calls, streamed or whole.

families/ has one file per format.
"""

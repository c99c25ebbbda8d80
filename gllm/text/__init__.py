"""Text to token ids and back: tokenizer, chat templates, incremental detokenizer, stop strings.

Imports no torch. output/ parses what a chat model writes.
"""

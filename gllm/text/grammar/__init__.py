"""Structured output: JSON Schema, regular expressions and grammars as masks of allowed tokens.

Compiles in a separate process, because a grammar can exhaust memory or crash the compiler.
"""

"""Grammar sources: checked and rewritten JSON Schemas, regular expressions, choices, grammars.

Imports no compiler, so that the chat package can use it.
"""

"""The HTTP server: routes, request fields, middleware, streaming and the chat page.

Knows an engine only by gllm/engine/interface.py.
"""

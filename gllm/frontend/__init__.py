"""HTTP server: OpenAI-compatible and other APIs, middleware, streaming, metrics and the chat page.

Uses an engine only through gllm/engine/interface.py.
"""

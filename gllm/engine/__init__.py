"""The embeddable objects: Engine (asyncio), LLM (blocking), their requests and the interface.

The frontend imports only interface.py and chat.py. `from gllm import Engine, LLM` imports the
classes on first use.
"""

"""The embeddable objects: Engine (asyncio), LLM (blocking), their requests and the interface.

The frontend imports only interface.py. `from gllm import Engine, LLM` loads them on first use.
"""

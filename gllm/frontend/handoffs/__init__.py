"""Disaggregated prefill under the routers of vLLM and SGLang, called a hand-off in gllm.

Such a router sends a request to an engine that prefills it and to one that decodes it. Each
router's request fields are a file with a line in `registry.py`; docs/disaggregation.md describes
them.
"""

"""Hand-offs that routers of other projects direct over HTTP.

Such a router sends a request to an engine that prefills it and to one that decodes it. Each dialect
is a file with a line in `registry.py`; docs/disaggregation.md describes them.
"""

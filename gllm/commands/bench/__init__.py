"""`gllm bench`: load on a server over HTTP, and measurements of an engine without HTTP."""

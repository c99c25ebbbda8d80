"""Sub-commands of `gllm`, imported when they are called. gllm/__main__.py has their table."""

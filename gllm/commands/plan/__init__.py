"""The planners of `gllm plan`, one module each."""

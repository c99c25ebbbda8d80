"""A worker: one rank of one pipeline stage, its executors and its part of the KV cache."""

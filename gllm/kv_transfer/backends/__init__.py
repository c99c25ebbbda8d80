"""Backends: ways by which bytes of a KV cache get from one mover to another. One file each."""

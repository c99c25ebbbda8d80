"""Every message that crosses a process border, by subject, and the codec.

The wire format is msgpack with a schema for each message. Sockets are in gllm/runtime.
"""

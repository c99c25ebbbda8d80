"""Messages between the processes of an engine, by subject, and their codec.

The wire format is msgpack with a schema for each message. The sockets are in
gllm/runtime/messaging/bus.py.
"""

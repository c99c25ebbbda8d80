"""The executor of a stage on a CUDA device: copies, graphs, sampling on the device.

The host queues work on streams and waits only for events (gllm/transport/device_streams.py).
"""

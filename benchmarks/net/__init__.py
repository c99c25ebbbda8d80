"""Test rig for networks: machines as network namespaces, shaped hops, proxies, captured packets."""

"""Sessions between processes: sockets, keys, reconnection, and the links to routers."""

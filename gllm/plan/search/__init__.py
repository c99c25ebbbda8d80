"""Search over engine designs: device, parallelism, policy and batch size (Vidur)."""

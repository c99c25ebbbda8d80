"""Steps before and after each route: request ids, keys, limits, origins, errors, metrics."""

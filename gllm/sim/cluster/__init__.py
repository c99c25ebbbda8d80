"""Clusters in simulated time: many engines behind a router, failures, drains and KV transfers."""

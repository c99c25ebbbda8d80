"""Master of a cluster: starts and ends services, each one engine, on nodes without a model.

Source: the MoLink platform's service and device calls; docs/platform.md maps them to ours.
"""

"""Planners: from a model, devices, links, a workload and goals to a plan that `gllm up` starts."""

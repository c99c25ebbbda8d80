"""Clusters of prompt and token machines: sizes of both pools under nine SLOs."""

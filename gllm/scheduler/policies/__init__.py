"""Policies of other serving systems that presets and planners use, one file each.

Those for comparisons with papers alone are in experiments/policies.
"""

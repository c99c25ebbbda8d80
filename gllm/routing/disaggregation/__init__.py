"""Disaggregation: which engine prefills a request, which one decodes it, and when that is chosen.

Everything here is pure: states of engines, random numbers and time are arguments.
"""

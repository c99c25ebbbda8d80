"""Routing: which engine of a fleet serves a request, and which requests are refused.

Everything here is pure: states of engines, random numbers and time are arguments.
"""

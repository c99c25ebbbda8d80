"""Simulator of a deployment: the production scheduler over predicted step times.

costs/ predicts the time of a step, from a profile or from data sheets.
"""

"""Predictors of the time of one step on one stage."""

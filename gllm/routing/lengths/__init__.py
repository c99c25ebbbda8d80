"""Predictors of output lengths that read the prompt, and the accuracy of every predictor."""

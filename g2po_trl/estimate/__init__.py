"""Estimate of a run: memory by part, and tokens, from the model's shape and the configuration."""

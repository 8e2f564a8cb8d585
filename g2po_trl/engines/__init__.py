"""Engines: token ids in, completions and log-probabilities out."""

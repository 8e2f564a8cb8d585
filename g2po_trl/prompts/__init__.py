"""Prompts: the text a model reads at each step, and the action in its completion."""

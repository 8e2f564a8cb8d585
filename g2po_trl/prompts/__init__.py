"""Prompts: the text a model reads at each step, and the action its completion means."""

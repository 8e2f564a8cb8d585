"""Evaluation: tasks played by prompted chat models or trained ones."""

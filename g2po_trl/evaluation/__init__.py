"""Evaluation: tasks played by prompted chat models or trained ones, and environments examined before training."""

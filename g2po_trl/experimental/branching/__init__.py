"""Branching: episodes that continue others from states of interest."""

"""Branching: episodes that continue others from chosen states."""

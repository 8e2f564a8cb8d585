"""Experimental features: off by default, with their own tests, subject to change without notice."""

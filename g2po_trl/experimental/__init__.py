"""Off by default, with their own tests; they may change without notice."""

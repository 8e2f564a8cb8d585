"""Small tools that every room may use: JSON, optional dependencies, secrets."""

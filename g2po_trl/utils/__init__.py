"""Helpers for all packages: options, errors, JSON, secrets, adapters, and private names of TRL."""

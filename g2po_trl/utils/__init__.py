"""Small tools that every room may use: options, errors, JSON, secrets, adapters, and the inside of TRL."""

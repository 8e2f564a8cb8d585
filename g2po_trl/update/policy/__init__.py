"""One policy: comparison of trainer, engine and reference; the reference of an adapter; importance weights."""

"""One policy: numerical comparison of trainer, engine and reference; the reference of an adapter; engine's weights."""

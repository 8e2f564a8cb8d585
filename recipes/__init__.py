"""Training scripts and their settings, installed as `g2po_recipes`; `g2po train` starts them by name."""

"""Environments of g2po-trl, imported as `g2po_envs`: one folder each, knowing `g2po_trl.environment` alone."""

"""Environments of g2po-trl, imported as `g2po_envs`: one folder each. They import only contract and prompts."""

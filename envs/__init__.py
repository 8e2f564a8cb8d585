"""Environments of g2po-trl, imported as `g2po_envs`: one folder each. They import only contract and prompts.

`adapters` wraps environments of other libraries; `starters` and `coding` are files that `g2po init` copies.
"""

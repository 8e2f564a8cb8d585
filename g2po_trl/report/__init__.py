"""What a run's files show: the paper's analyses as functions, and plots of them. Reads files; trains nothing.

`python -m g2po_trl.report RUN` writes all of it for a run.
"""

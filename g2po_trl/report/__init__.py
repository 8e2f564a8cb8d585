"""Report: the paper's analyses of a run's files as functions, and plots of them.

It trains nothing. `g2po report RUN` writes all of it for a run.
"""

"""Report: the paper's analyses of a run's files as functions, plots of them, and credit for logged runs.

It trains nothing. `g2po report RUN` writes all of it for a run, `g2po credit FILE` the credit of a log.
"""

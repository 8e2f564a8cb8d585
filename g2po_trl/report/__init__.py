"""Report: a run in five lines, the test of its state keys, and credit for logged runs.

It trains nothing. `g2po report RUN` writes all of it for a run, `g2po credit FILE` the credit of a log.
"""

"""Report: a run in five lines, the test of its state keys, and credit for logged runs.

`g2po report RUN` writes the report of a run, `g2po credit FILE` the credit of a log. Nothing is trained.
"""

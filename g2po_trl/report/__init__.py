"""Report: a run in five lines, and the test of its state keys."""

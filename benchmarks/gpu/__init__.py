"""One command for a GPU that is lent for minutes: `run.py`, whose parts are processes of `jobs.py`.

`learning.py` plays a run, `phases.py` measures log-probabilities and update, tests are those of tests/gpu. The page of
a results file is made by `table.py`, and the comparison of methods by `methods.py`. `--shrink` rehearses everything
without a GPU. Never run on a GPU so far: larger rooms, the phases of hybrids, the usual pair of `repeat`.
"""

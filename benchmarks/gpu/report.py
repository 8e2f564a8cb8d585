"""A plugin of pytest: after every test, one line of JSON in the file $GPU_FINDINGS. For `benchmarks/gpu/run.py`."""

import json
import os


def pytest_runtest_logreport(report):
    if report.when != "call" and report.outcome == "passed":
        return
    line = {"test": report.nodeid.split("::")[-1], "outcome": report.outcome, "seconds": round(report.duration, 1)}
    line |= dict(report.user_properties)
    if report.outcome == "skipped":
        line["reason"] = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    elif report.outcome == "failed":
        line["reason"] = str(report.longrepr).splitlines()[-25:]
    with open(os.environ["GPU_FINDINGS"], "a") as file:
        file.write(json.dumps(line) + "\n")

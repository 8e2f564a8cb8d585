"""`python run_tests.py`: run the tests of the current folder, the functions `test_*` of its files `test_*.py`.

pytest runs them too, and knows more: classes, fixtures, folders, packages. This takes 20 ms, ends a test that runs for
ever, and names the lines that the first failure ran.
"""

import os
import signal
import sys

SECONDS = 0.2  # of processor time that a test may take


def end(*signal_and_frame):
    raise TimeoutError


def failure(test):
    """Return the line at which a test fails, and the lines that it ran; "" if it passes."""
    ran = {}

    def trace(frame, event, _):
        folder, file = os.path.split(frame.f_code.co_filename)
        if folder == os.getcwd() and not file.startswith("test_"):
            ran.update({f"{file}:{frame.f_lineno}": None} if event == "line" else {})
        return trace

    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    sys.settrace(trace)
    try:
        test()
    except Exception as error:
        sys.settrace(None)
        at = error.__traceback__.tb_next or error.__traceback__  # the latter: the test takes arguments
        with open(at.tb_frame.f_code.co_filename, encoding="utf-8") as file:
            line = file.readlines()[at.tb_lineno - 1].strip()
        line = line if isinstance(error, AssertionError) else f"{line}: {type(error).__name__}"
        return f"{line}\nran {' '.join(ran)}"
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return ""


def main():
    signal.signal(signal.SIGVTALRM, end)
    sys.path[0] = os.getcwd()
    sys.dont_write_bytecode = True  # two versions of a file may have the same time and size
    try:
        modules = [__import__(name[:-3]) for name in sorted(os.listdir()) if name.startswith("test_")]
    except Exception as error:
        sys.exit(f"the tests cannot be run: {type(error).__name__}")
    tests = [getattr(module, name) for module in modules for name in vars(module) if name.startswith("test_")]
    if not tests:
        sys.exit("the tests cannot be run: no function test_* in test_*.py")
    failures = list(filter(None, map(failure, tests)))
    print(f"{len(failures)} of {len(tests)} tests fail: {failures[0]}" if failures else "all tests pass")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()

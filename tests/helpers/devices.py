"""Which devices tests may see."""

import os

from _pytest.mark.expression import Expression


def hide_gpus(config) -> None:
    """Hide GPUs from tests that are not for them: two processes have two devices on a CPU, and equal digits."""
    chosen = config.getoption("markexpr")
    if not chosen:
        return  # all of them

    def takes(*marks: str) -> bool:
        return Expression.compile(chosen).evaluate(lambda name, **_: name in marks)

    if not any(takes(mark) and not takes() for mark in ("gpu", "vllm", "pretrained")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

"""Write the lists of docs/architectures.md from what models do here: `python docs/make_architectures.py`.

Every family is built tiny and at random; a few minutes on one core. Tests compare the lists with the page.
"""

import logging
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "invariants")]

import test_architectures  # noqa: E402
import test_causal_models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

PAGE = Path(__file__).with_name("architectures.md")


def replaced(page: str, begin: str, text: str) -> str:
    """Return a page with another text after a mark, up to the next heading or the end."""
    head, mark, rest = page.partition(begin)
    _, heading, tail = rest.partition("\n## ")
    return f"{head}{mark}{text}\n{heading}{tail}"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    page, started = PAGE.read_text(encoding="utf-8"), time.perf_counter()
    found = test_causal_models.outcomes()
    counts = Counter(of for of, _ in found.values())
    print(f"{len(found)} causal language models in {time.perf_counter() - started:.0f} s: {dict(counts)}")
    page = replaced(page, test_causal_models.MARK, test_causal_models.written(found))
    page = replaced(page, test_architectures.MARK, test_architectures.families())
    PAGE.write_text(page, encoding="utf-8")

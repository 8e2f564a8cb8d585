"""Write docs/causal_models.json and the lists of docs/architectures.md from what models do here.

`python docs/make_architectures.py [TYPE …]` builds every family tiny and at random, or only the model types given; it
takes minutes on one core. Tests compare both files.
"""

import logging
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "invariants")]

import test_architectures  # noqa: E402
import test_causal_models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


def write_after(begin: str, text: str) -> None:
    """Write another text after a mark of the page, up to the next heading or the end."""
    page = test_causal_models.PAGE
    head, mark, rest = page.read_text(encoding="utf-8").partition(begin)
    _, heading, tail = rest.partition("\n## ")
    page.write_text(f"{head}{mark}{text}\n{heading}{tail}", encoding="utf-8")


def write_causal_models(found: dict[str, tuple[str, str]]) -> None:
    """Write the outcome of every causal language model to the list and the page."""
    test_causal_models.LIST.write_text(test_causal_models.listed(found), encoding="utf-8")
    text = f"{test_causal_models.versions()}\n\n{test_causal_models.table(found)}"
    write_after(test_causal_models.MARK, text)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    started = time.perf_counter()
    names = sys.argv[1:]
    found = test_causal_models.outcomes(names or test_causal_models.MODEL_TYPES)
    counts = Counter(of for of, _ in found.values())
    print(f"{len(found)} causal language models in {time.perf_counter() - started:.0f} s: {dict(counts)}")
    write_causal_models((test_causal_models.recorded() if names else {}) | found)
    if not names:
        write_after(test_architectures.MARK, test_architectures.families())

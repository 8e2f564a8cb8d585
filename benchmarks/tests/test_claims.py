"""`make numbers`: the pages say what the raw files give, and a page that says otherwise is found out."""

import re

import pytest

from benchmarks.claims import check as check_numbers
from benchmarks.claims import sources
from benchmarks.claims.check import ROOT, agrees, problems, read
from benchmarks.common import RESULTS
from benchmarks.learning.comparison import MEASURES, load, secondary
from benchmarks.learning.statistics import dunnett


@pytest.fixture(scope="module")
def said():
    return read(check_numbers.SAID.read_text(encoding="utf-8"))


@pytest.fixture
def texts(said):
    return {page: (ROOT / page).read_text(encoding="utf-8") for page in said}


def other(number):
    """The number with another last digit of its mantissa."""
    if not number[-1].isdigit():
        return "twelve" if number.lower() != "twelve" else "two"
    return number[:-1] + str((int(number[-1]) + 3) % 10)


def test_the_pages_say_what_the_raw_files_give(said, texts):
    assert problems(texts, said) == []


def test_the_comparisons_tests_are_those_of_other_code():
    """The page's, integrated by quadrature, and the report's, by a multivariate t distribution."""
    runs = load(RESULTS / "comparison")["main"]
    for number, measure in (("first half", MEASURES["first half"]), ("both", secondary)):
        numbers = {(arm, seed): 100 * measure(run) for arm in sources.ARMS for seed, run in runs[arm].items()}
        for arm, wanted in dunnett(numbers, "g2po").differences.items():
            assert sources.tested(arm, number) == pytest.approx([wanted.mean, *wanted.interval], abs=0.02)
            assert sources.tested_p(arm, number) == pytest.approx(wanted.p, abs=2e-3)


def test_every_number_that_changes_is_found_with_its_line(said, texts):
    """Every third number at once: one at a time would take minutes."""
    for page, text in texts.items():
        spans = sorted(
            {m.span(n + 1) for _, p, v in said[page].pieces for m in p.finditer(text) for n in range(len(v))}
        )
        for first in range(3):
            changed = text
            for start, end in reversed(spans[first::3]):
                changed = changed[:start] + other(text[start:end]) + changed[end:]
            found = {line for line in problems({**texts, page: changed}, said) if ": says " in line}
            for start, end in spans[first::3]:
                at, number = text.count("\n", 0, start) + 1, re.escape(other(text[start:end]))
                assert any(re.match(rf"{page}:{at}: says {number}, found ", line) for line in found), (
                    at,
                    text[start:end],
                )


def test_the_message_names_page_line_the_number_said_and_the_number_found(said, texts):
    page = texts["benchmarks/results/README.md"]
    wrong, found = re.subn(r"(one optimizer step gained )[\d.]+", r"\g<1>99.9", page)
    assert found == 1
    (problem,) = problems({**texts, "benchmarks/results/README.md": wrong}, said)
    line = next(n for n, line in enumerate(wrong.splitlines(), 1) if "gained 99.9" in line)
    assert problem.startswith(f"benchmarks/results/README.md:{line}: says 99.9, found 10.938")


@pytest.mark.parametrize(
    "new", ["It gains 12.5 points.", "| new | 0.87 |", "5 hours", "−3", "```bash\nmake x  # 7 s\n```"]
)
def test_a_number_that_nothing_accounts_for_is_found(said, texts, new):
    texts["README.md"] += f"\n{new}\n"
    (problem,) = problems(texts, said)
    number = re.search(r"[−+]?\d[\d.]*", new)[0]
    assert problem.endswith(f"nothing accounts for {number}") and problem.startswith("README.md:")


@pytest.mark.parametrize(
    "code",
    ["`x = 3`", "G2PO and Qwen2.5-7B", "[text](page-3.md#a-4)", "```python\nx = 3\n```", "```bash\nrun --x 3\n```"],
)
def test_code_and_names_are_no_numbers(said, texts, code):
    texts["README.md"] += f"\n{code}\n"
    assert problems(texts, said) == []


def test_a_text_that_is_gone_is_found(said, texts):
    details = "benchmarks/results/README.md"
    texts[details] = texts[details].replace("| HGPO |", "| Another |")
    found = problems(texts, said)
    assert any("does not have the text '| HGPO |" in line for line in found)
    assert any("nothing accounts for" in line for line in found)


@pytest.mark.parametrize(
    "number, value, right",
    [
        ("0.75", 0.7492, True),
        ("0.75", 0.7449, False),
        ("−0.060", -0.0602, True),
        ("0.060", -0.0602, False),
        ("+28.6", 28.646, True),
        ("4,235", 4235, True),
        ("4,236", 4235, False),
        ("5e-4", 0.0005, True),
        ("5e-4", 0.0004, False),
        ("four", 4, True),
        ("Four", 5, False),
        ("12", float("nan"), False),
    ],
)
def test_a_number_agrees_if_it_is_the_value_rounded(number, value, right):
    assert agrees(number, value) is right

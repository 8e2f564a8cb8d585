"""Recompute every number on README.md, docs/benchmarks.md and benchmarks/results/README.md, and some of other pages.

    python -m benchmarks.claims.check        (make numbers)

`said.txt` has the pieces of text in which the pages quote numbers, with an expression in place of each number.
Expressions call `sources.py`, which reads raw values, recipes and defaults. Prints a line for

- a number that is not the expression's value, rounded as the page has it;
- a piece of text that is not on its page;
- a number on a page that no piece covers, so that nobody adds one unchecked;

and exits with 1 if there is any. What is in backticks, in a code block (but for comments of commands) or in the target
of a link is code and not looked at, nor are digits within a word (G2PO, 7B).

The format of `said.txt`: `= PAGE` begins a page, `≈ PAGE` one that may have numbers beside those of its pieces. A line
is a piece of its text. Any white space in it stands for any other, `{{expression}}` for what that returns: one number,
two for `number ± number`, three for `number [number, number]`. There, "two" to "twelve" are numbers, too.
`~ PATTERN ~ REASON` sets digits apart that are neither measured nor set. A line that starts with `#` is a comment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.claims import sources as numbers_sources
from benchmarks.common import ROOT

SAID = Path(__file__).with_name("said.txt")
WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
DIGITS = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-−]?\d+)?"
NUMBER = rf"(?<![\w.])([+−-]?{DIGITS}|(?i:\b(?:{'|'.join(WORDS)})\b))"
FORMS = {1: NUMBER, 2: rf"{NUMBER}\s+±\s+{NUMBER}", 3: rf"{NUMBER}\s+\[{NUMBER},\s+{NUMBER}\]"}
LONE = re.compile(rf"(?<![\w.])(?<!\w-)[+−]?{DIGITS}(?!\w|[.,]\d)")
COMMANDS = re.compile(r"(?<=```bash\n).*?(?=```)", re.DOTALL)  # their comments are prose
CODE = (
    re.compile(r"```(?:python|py|yaml|diff)\n.*?```|<!--.*?-->", re.DOTALL),
    re.compile(r"`[^`\n]+(?:\n[^`\n]+)?`"),
    re.compile(r"(?<=\])\([^()]*\)"),
)


@dataclass
class Page:
    """What is said of a page.

    Args:
        pieces: (text, pattern with a group for each number, values of the groups).
        apart: (pattern, reason) of digits that need not be accounted for.
        whole: whether each number of the page must be accounted for.
    """

    pieces: list[tuple[str, re.Pattern[str], list[float]]] = field(default_factory=list)
    apart: list[tuple[str, str]] = field(default_factory=list)
    whole: bool = True


def read(text: str) -> dict[str, Page]:
    """The pages of `said.txt`, with all expressions evaluated."""
    pages: dict[str, Page] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith(("= ", "≈ ")):
            page = pages[line[2:]] = Page(whole=line[0] == "=")
        elif line.startswith("~ "):
            pattern, reason = line[2:].split(" ~ ")
            page.apart.append((pattern, reason))
        elif not line.startswith("#"):
            page.pieces.append(piece(line))
    return pages


def piece(text: str) -> tuple[str, re.Pattern[str], list[float]]:
    """A line of the file: (text, pattern, values)."""
    pattern, values = "", []
    for number, part in enumerate(re.split(r"\{\{(.*?)\}\}", text)):
        if number % 2 == 0:
            pattern += r"\s+".join(re.escape(word) for word in re.split(r"\s+", part))
            continue
        value = eval(part, vars(numbers_sources))
        several = tuple(value) if isinstance(value, tuple) else (value,)
        pattern += FORMS[len(several)]
        values += [float(one) for one in several]
    return text, re.compile(pattern), values


def problems(texts: Mapping[str, str], pages: Mapping[str, Page]) -> list[str]:
    """What is wrong, as "page:line: …".

    Args:
        texts: of the pages, by path.
        pages: what is said of them.
    """
    found: set[tuple[str, int, str]] = set()
    for name, page in pages.items():
        text, accounted = texts[name], []
        for said, pattern, values in page.pieces:
            matches = list(pattern.finditer(text))
            if not matches:
                found.add((name, 0, f"does not have the text {said!r}"))
            for match in matches:
                for number, value in enumerate(values, 1):
                    accounted.append(match.span(number))
                    if not agrees(match[number], value):
                        message = f"says {match[number]}, found {shown(match[number], value)} (in {match[0]!r})"
                        found.add((name, line_of(text, match.start(number)), message))
        for pattern, _ in page.apart:
            spans = [match.span() for match in re.finditer(pattern, text)]
            if not spans:
                found.add((name, 0, f"has nothing like {pattern!r}, which is set apart"))
            accounted += spans
        for match in LONE.finditer(prose(text) if page.whole else ""):
            if not any(start < match.end() <= end for start, end in accounted):
                found.add((name, line_of(text, match.start()), f"nothing accounts for {match[0]}"))
    return [f"{name}:{line}: {message}" for name, line, message in sorted(found)]


def prose(text: str) -> str:
    """The text with code blanked out, so that the rest stays in its place."""
    text = COMMANDS.sub(lambda block: re.sub(r"^[^#\n]*", blank, block[0], flags=re.MULTILINE), text)
    for pattern in CODE:
        text = pattern.sub(blank, text)
    return text


def blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def agrees(said: str, value: float) -> bool:
    """Whether a number is the value, rounded as the number is written."""
    if said.lower() in WORDS:
        return value == WORDS.index(said.lower()) + 2
    mantissa, _, exponent = said.replace("−", "-").replace(",", "").partition("e")
    scale = 10.0 ** int(exponent or 0)
    unit = scale * 10.0 ** -len(mantissa.partition(".")[2])
    return abs(float(mantissa) * scale - value) <= unit / 2 * (1 + 1e-9)


def shown(said: str, value: float) -> str:
    """The value with two decimals more than the number."""
    return f"{value:.{len(said.partition('e')[0].partition('.')[2]) + 2}f}"


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def main() -> None:
    pages = read(SAID.read_text(encoding="utf-8"))
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in pages}
    found = problems(texts, pages)
    if found:
        print("\n".join(found), flush=True)
        sys.exit(f"{len(found)} to look at; said.txt holds what the pages say")
    for name, page in pages.items():
        count = sum(len(values) for *_, values in page.pieces)
        print(f"{name}: {count} numbers recomputed, {len(page.apart)} kinds of digits set apart")


if __name__ == "__main__":
    main()

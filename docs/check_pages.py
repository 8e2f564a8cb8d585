"""Check what the pages promise about themselves: length, contents, links, commits, and the recorded run.

    python docs/check_pages.py

`make docs` runs it. It prints each finding and exits with 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from g2po_trl.view.page import shell

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MOST_LINES_OF_README, MOST_PAGES, MOST_WORDS, MOST_WORDS_OF_LOG = 110, 24, 24_000, 5_000
LARGEST_RUN = 1_000_000  # characters of docs/_static/run.html


def check_lengths() -> Iterator[str]:
    """Yield what is too long."""
    lines = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    if lines > MOST_LINES_OF_README:
        yield f"README.md has {lines} lines, at most {MOST_LINES_OF_README}"
    words = {page.stem: len(page.read_text(encoding="utf-8").split()) for page in DOCS.glob("*.md")}
    if words["log"] > MOST_WORDS_OF_LOG:
        yield f"docs/log.md has {words['log']} words, at most {MOST_WORDS_OF_LOG}"
    if len(words) - 1 > MOST_PAGES:
        yield f"docs/ without the log has {len(words) - 1} pages, at most {MOST_PAGES}"
    if (total := sum(words.values()) - words["log"]) > MOST_WORDS:
        yield f"docs/ without the log has {total} words, at most {MOST_WORDS}"


def check_contents() -> Iterator[str]:
    """Yield pages that are not in the table of contents, in the index's table or in llms.txt."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL)
    order = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    if sorted([*order, "index", "log"]) != sorted(page.stem for page in DOCS.glob("*.md")):
        yield "docs/index.md's table of contents does not have each page once"
    if re.findall(r"\]\((\w+)\.md\)", (DOCS / "llms.txt").read_text(encoding="utf-8")) != order:
        yield "docs/llms.txt does not have the pages of docs/index.md in their order"
    for page in order:
        if f"]({page}.md)" not in index:
            yield f"docs/index.md does not link to {page}.md"


def check_links() -> Iterator[str]:
    """Yield links of pages to files that do not exist."""
    for page in [ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "benchmarks" / "results").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                yield f"{page.relative_to(ROOT)} links to {target}, which does not exist"


def check_recorded_run() -> Iterator[str]:
    """Yield that the recorded run of docs/reading_a_run.md is not in the page that the viewer writes today."""
    page = (DOCS / "_static" / "run.html").read_text(encoding="utf-8")
    blocks = re.findall(r'<script type="text/plain" .*?</script>', page)
    if page != shell("\n".join(blocks)) or len(page) > LARGEST_RUN:
        yield (
            "docs/_static/run.html is not of the current viewer, or too large: repeat docs/quickstart.md's game, then"
            " `g2po view runs/tidy --output docs/_static/run.html`; check the steps of docs/reading_a_run.md by it"
        )


def git(*words: str) -> str:
    """Return the output of a git command; empty if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def check_commits() -> Iterator[str]:
    """Yield commits that pages name and the history does not have, and files that are not at the commit named."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        return
    pages = [ROOT / path for path in git("ls-files", "*.md").splitlines()]
    text = " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in pages)
    named = re.findall(r"\bcommits? (`[0-9a-f]{7,40}`(?:(?:, | and |, and )`[0-9a-f]{7,40}`)*)", text)
    for commit in sorted(set(re.findall(r"[0-9a-f]+(?=`)", " ".join(named)))):
        if not git("merge-base", commit, "HEAD").startswith(commit):
            yield f"commit {commit} is not in the history"
    for path, commit in re.findall(r"`([\w./]+)` at commit `([0-9a-f]{7,40})`", text):
        if not git("cat-file", "-t", f"{commit}:{path}"):
            yield f"{path} does not exist at commit {commit}"


def main() -> None:
    findings = [*check_lengths(), *check_contents(), *check_links(), *check_commits(), *check_recorded_run()]
    print("\n".join(findings), end="\n" if findings else "")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()

"""Summarise a run in five lines: success, where groups fail, what recurs, the verdict, what to do.

    g2po report RUN                 # the five lines; numbers in RUN/report
    g2po report RUN --details       # also tasks never solved, where episodes fail, the test of the state keys

RUN is the folder of a training run or of `g2po credit`. The test of the state keys measures how well the values of
each λ predict the returns of held-out episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...report import key_quality as keys
from ...report import key_texts, losses
from ...report.plain import five_lines
from ...report.summary import analyse
from ...runs.iterations import load_evaluations, load_iterations, load_replaced
from ...runs.run_json import read_run
from ...runs.verdict import verdict_of
from ...utils.json import write_json
from ...utils.options import option, require
from ...utils.show import wrapped
from ..parser import parse


@dataclass
class Options:
    run: Path = option("output_dir of a run, or --output of `g2po credit`", positional=True, metavar="RUN")
    output: Path | None = option("where to write; default: RUN/report", None, metavar="FOLDER")
    gamma: float | None = option("discount per step; default: the run's, or 0.95 if it records none", None)
    details: bool = option("also print tasks never solved, where episodes fail, and the test of the state keys", False)


def main(argv: Sequence[str] | None = None) -> None:
    args, _ = parse((Options,), argv, command="g2po report", description=__doc__)
    run = read_run(args.run)
    iterations = load_iterations(args.run)
    unfinished = sum(iteration.unfinished for iteration in iterations)
    iterations = [iteration for iteration in iterations if iteration.groups]
    require(bool(iterations), "run", str(args.run), "it has no complete episode yet: wait for one")
    numbers = analyse(iterations, args.gamma, run)
    output = args.output or args.run / "report"
    write_json(output / "analysis.json", numbers, indent=1)
    groups = [group for iteration in iterations for group in iteration.groups]
    verdict = verdict_of(groups, run, load_replaced(args.run))
    print(five_lines(iterations, numbers, run, load_evaluations(args.run), verdict, str(args.run)), end="\n\n")
    if unfinished:
        print(f"incomplete lines that were skipped: {unfinished}")
    if args.details:
        found = [keys.text(numbers["prediction"]), *key_texts.text(numbers["hidden_example"])]
        print("\n".join(found), losses.text(numbers["losses"], str(args.run)), sep="\n\n", end="\n\n")
    more = "" if args.details else "; --details adds tasks never solved, where episodes fail, and the test of the keys"
    print(wrapped(f"{output / 'analysis.json'}{more}"))

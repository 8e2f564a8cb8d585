"""Summarise a run in five lines: success, where groups fail, what recurs, the verdict, what to do.

    g2po report RUN                 # the five lines; numbers in RUN/report
    g2po report RUN --details       # the statistics too

RUN is the folder of a training run or of `g2po credit`. The statistics are visits of states, and the test of the state
keys: how well the values of each λ predict the returns of held-out episodes.
"""

from __future__ import annotations

from pathlib import Path

from ...report import state_key_test as keys
from ...report.iterations import load_iterations, load_replaced
from ...report.plain import five_lines
from ...report.summary import analyse, notes, summary, verdict_on
from ...runs.run_json import read_run
from ...utils.json import read_json_lines, write_json
from ...utils.parser import Parser


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="g2po report", description=__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="output_dir of a run, or --output of `g2po credit`")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="where to write; default: RUN/report")
    given = "discount per step; default: the run's, or 0.95 if the run does not record it"
    parser.add_argument("--gamma", metavar="X", type=float, help=given)
    parser.add_argument("--details", action="store_true", help="print the statistics too")
    args = parser.parse_args(argv)
    try:
        run = read_run(args.run)
        iterations = load_iterations(args.run)
        numbers = analyse(iterations, args.gamma, run)
    except ValueError as error:
        raise SystemExit(str(error)) from error

    output = args.output or args.run / "report"
    try:
        write_json(output / "analysis.json", numbers, indent=1)
    except OSError as error:
        raise SystemExit(f"{output} cannot be written ({error.strerror or error}): pass --output FOLDER") from error
    rows, path = numbers["iterations"], args.run / "evaluations.jsonl"
    evaluations = read_json_lines(path) if path.is_file() else []
    verdict = verdict_on(iterations, run, load_replaced(args.run))
    print(five_lines(iterations, numbers, run, evaluations, verdict), end="\n\n")
    if args.details:
        print("\n".join([summary(rows, run), "", keys.text(numbers["prediction"]), *notes(run), ""]))
    print(f"{output / 'analysis.json'}{'' if args.details else '; --details prints the statistics'}")

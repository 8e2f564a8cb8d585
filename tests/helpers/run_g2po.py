"""`g2po` in this process: exit code, output and errors."""

from g2po_trl.cli import main

LONGEST = 120  # characters of a line, but for commands


def outcome(capsys, *arguments):
    """Return exit code, output and errors of `g2po ARGUMENTS`, each finding of `check` in one line."""
    try:
        main(list(arguments))
        code = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    said, errors = capsys.readouterr()
    if arguments[0] == "check" and "--help" not in arguments:  # findings are wrapped
        findings = [line for line in said.splitlines() if not line.startswith("Next: ")]
        assert max(map(len, findings), default=0) <= LONGEST, said
        said = said.replace("\n" + " " * 10, " ")
    return code, said, errors

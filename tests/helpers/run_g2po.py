"""`g2po` in this process: exit code, output and errors."""

from g2po_trl.cli import main

LONGEST = 120  # characters of a line, but for commands


def outcome(capsys, *arguments):
    """Return exit code, output and errors of `g2po ARGUMENTS`; a finding, which is wrapped, in one line."""
    try:
        main(list(arguments))
        code = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    said, errors = capsys.readouterr()
    findings = [line for line in said.splitlines() if not line.startswith("Next: ")]
    assert arguments[0] != "check" or max(map(len, findings), default=0) <= LONGEST, said
    return code, said.replace("\n" + " " * 10, " "), errors

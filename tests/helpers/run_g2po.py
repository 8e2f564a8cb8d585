"""`g2po` in this process: exit code, output and errors."""

from g2po_trl.cli import main


def outcome(capsys, *arguments):
    """Return exit code, output and errors of `g2po ARGUMENTS`, each finding of `check` in one line."""
    try:
        main(list(arguments))
        code = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    said, errors = capsys.readouterr()
    if arguments[0] == "check" and "--help" not in arguments:  # findings are wrapped
        said = said.replace("\n" + " " * 10, " ")
    return code, said, errors

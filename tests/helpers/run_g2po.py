"""`g2po` in this process: exit code, output and errors."""

from g2po_trl.cli import main


def outcome(capsys, *arguments):
    """Return exit code, output and errors of `g2po ARGUMENTS`."""
    try:
        main(list(arguments))
        code = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    return code, *capsys.readouterr()

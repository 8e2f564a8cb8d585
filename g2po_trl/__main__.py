"""`python -m g2po_trl …` is `g2po …`."""

import os
import sys
from pathlib import Path

# `-m` puts the current folder first: a file of it called like a library would be imported instead of the library.
if sys.path[0] in ("", os.getcwd()) and Path.cwd() != Path(__file__).resolve().parents[1]:
    del sys.path[0]

from g2po_trl.cli import main
from g2po_trl.cli.launch import end_with_launcher

end_with_launcher()
main()

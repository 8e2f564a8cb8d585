"""The notebook runs from top to bottom, in a fresh kernel; what is stored in it is what its cells print and draw."""

import ast
import importlib.util
import json
import runpy
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "recipes" / "notebooks" / "quickstart.ipynb"
needed = ("nbclient", "ipykernel", "matplotlib")
missing = [name for name in needed if importlib.util.find_spec(name) is None]


def test_stored_outputs_are_those_of_the_stored_cells():
    """After a change: python docs/make_notebook.py."""
    notebook = json.loads(NOTEBOOK.read_text())
    make = runpy.run_path(str(NOTEBOOK.parents[2] / "docs" / "make_notebook.py"))
    assert notebook["metadata"]["executed"] == make["digest"](notebook)
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert json.dumps(outputs).count("iteration  10/10 | success") == 2 and NOTEBOOK.stat().st_size < 500_000
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for imported in (node for source in sources if "%pip" not in source for node in ast.parse(source).body):
        if isinstance(imported, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(imported), {})


@pytest.mark.slow
@pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
def test_the_quickstart_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    text = "".join(o.text for o in outputs if o.output_type == "stream")
    assert text.count("iteration  10/10 | success") == 2
    assert "keeps the contract" in text
    kinds = {kind for o in outputs if "data" in o for kind in o.data}
    assert {"text/html", "image/png"} <= kinds, "the viewer's page and the curves"
    shown = [o.data["text/html"] for o in outputs if "data" in o and "text/html" in o.data]
    (page,) = [html for html in shown if html.startswith("<iframe srcdoc=")]
    assert "iteration-10" in page

"""The notebook runs from top to bottom, in a fresh kernel, and shows what it says."""

import importlib.util
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "recipes" / "notebooks" / "quickstart.ipynb"
needed = ("alfworld", "nbclient", "ipykernel", "pyvis", "matplotlib")
missing = [name for name in needed if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
def test_the_quickstart_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    text = "".join(o.text for o in outputs if o.output_type == "stream")
    assert "iteration   4/4 | success" in text and text.count("iteration  10/10 | success") == 2
    assert "keeps the contract" in text
    kinds = {kind for o in outputs if "data" in o for kind in o.data}
    assert {"text/html", "image/png"} <= kinds
    shown = [o.data["text/html"] for o in outputs if "data" in o and "text/html" in o.data]
    (page,) = [html for html in shown if html.startswith("<iframe srcdoc=")]
    assert "iteration-4" in page

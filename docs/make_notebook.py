"""Run recipes/notebooks/quickstart.ipynb and store what it prints and draws: `python docs/make_notebook.py`.

The viewer's page, too large for a repository, is stored as a picture of it (by chromium). Takes some minutes.
"""

import base64
import hashlib
import html
import io
import subprocess
import tempfile
from pathlib import Path

NOTEBOOK = Path(__file__).parents[1] / "recipes" / "notebooks" / "quickstart.ipynb"
SIZE = (1200, 900)


def digest(notebook) -> str:
    """Of the sources of the code cells: outputs belong to these."""
    code = "\0".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def picture(iframe: str, folder: Path) -> str:
    """Return a page in an iframe as a PNG, in base64."""
    from PIL import Image

    page, image, small = folder / "page.html", folder / "page.png", io.BytesIO()
    page.write_text(html.unescape(iframe.partition('srcdoc="')[2].partition('"')[0]), encoding="utf-8")
    size = ",".join(map(str, SIZE))
    options = [
        "--headless",
        "--no-sandbox",
        "--hide-scrollbars",
        "--virtual-time-budget=20000",
        f"--window-size={size}",
    ]
    subprocess.run(["chromium", *options, f"--screenshot={image}", page.as_uri()], check=True, capture_output=True)
    Image.open(image).convert("RGB").quantize(96).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as name:
        NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": name}}).execute()
        for cell in notebook.cells:
            cell.metadata = {}
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if data.get("text/html", "").startswith("<iframe"):
                    data["image/png"] = picture(data.pop("text/html"), Path(name))
                    data["text/plain"] = "The viewer's page: run the cell to click in it."
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    notebook.metadata["executed"] = digest(notebook)
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK.name}: {NOTEBOOK.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

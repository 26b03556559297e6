"""Runs the example notebook and writes it with its results: `python run.py OUT.ipynb`."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

here = Path(__file__).parent
notebook = nbformat.read(here / "schemes.ipynb", as_version=4)
NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(here)}}).execute()
outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
plots = sum("image/png" in output.get("data", {}) for output in outputs)
if plots != 3:
    sys.exit(f"schemes.ipynb: should draw 3 plots, drew {plots}")
nbformat.write(notebook, sys.argv[1])
print(f"schemes.ipynb: {len(notebook.cells)} cells, {plots} plots")

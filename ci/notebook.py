"""Run examples/fractional_gpu.ipynb from top to bottom in a separate folder. usage: python ci/notebook.py [--write]

Needs nbclient and ipykernel from the extra `test`. If a cell raises an error, the exit code is 1. --write saves the
outputs in the notebook, without warnings, and without addresses and paths of this machine.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from common import ROOT
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOK = ROOT / "examples" / "fractional_gpu.ipynb"
_KEPT = ("output_type", "data", "text", "name")


def ran(notebook: nbformat.NotebookNode, folder: str) -> nbformat.NotebookNode:
    """Execute all cells with this interpreter in a separate folder."""
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    return client.execute()


def cleaned(notebook: nbformat.NotebookNode, folder: str) -> nbformat.NotebookNode:
    """Keep the outputs of the cells, without times, warnings and data of this machine."""
    number = 0
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        number += 1
        cell.execution_count = number
        cell.outputs = [_cleaned(output, number) for output in cell.outputs if output.get("name") != "stderr"]
    text = nbformat.writes(notebook).replace(folder, ".").replace(str(ROOT), ".").replace(sys.prefix, ".")
    return nbformat.reads(_without_machine(text), as_version=4)


def _cleaned(output: nbformat.NotebookNode, number: int) -> nbformat.NotebookNode:
    kept = nbformat.NotebookNode({key: output[key] for key in _KEPT if key in output})
    if kept.output_type in ("execute_result", "display_data"):
        kept.metadata = {}
    if kept.output_type == "execute_result":
        kept.execution_count = number
        if "text/html" in kept.data:
            del kept.data["text/plain"]
    return kept


def _without_machine(text: str) -> str:
    for address in set(re.findall(r"\b(?:\d{1,3}\.){3}\d{1,3}\b", text)) - {"127.0.0.1", "0.0.0.0"}:
        text = text.replace(address, "10.0.0.3")
    return text


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            notebook = nbformat.read(NOTEBOOK, as_version=4)
            metadata = dict(notebook.metadata)
            notebook = ran(notebook, str(Path(folder).resolve()))
        except CellExecutionError as error:
            sys.exit(str(error))
        if "--write" in sys.argv:
            notebook.metadata = metadata
            nbformat.write(cleaned(notebook, str(Path(folder).resolve())), NOTEBOOK)


if __name__ == "__main__":
    main()

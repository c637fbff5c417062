"""Executes notebooks in a kernel, each in a folder of its own, as a user would: run.py NAME... (of notebooks/, without .ipynb).

A cell with the tag `restart-kernel` is where a user restarts the kernel: it is killed there. Prints a line per notebook; what the
cells printed is in target/notebooks/. Fails if a cell does.
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = ROOT / "target/notebooks"
# A cell that takes longer hangs.
CELL_SECONDS = 400
RESTART = "restart-kernel"


async def execute(book, folder: Path) -> None:
    """Executes the cells in order."""
    client = NotebookClient(book, timeout=CELL_SECONDS, resources={"metadata": {"path": str(folder)}})
    async with client.async_setup_kernel():
        for number, cell in enumerate(book.cells):
            if RESTART in cell.metadata.get("tags", []):
                await client.km.signal_kernel(signal.SIGKILL)
                await client.km.restart_kernel(now=True)
                client.kc.stop_channels()
                client.kc = client.km.client()
                client.kc.start_channels()
                await client.kc.wait_for_ready(timeout=60)
            await client.async_execute_cell(cell, number)


def problem(book) -> str | None:
    """What is wrong with the outputs of an executed notebook, if anything."""
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data.get("text/html", "") for output in outputs if output.output_type == "display_data"]
    cards = [text for text in shown if '<iframe id="baton-' in text]
    if not cards:
        return "no cell shows the card of a job"
    if not any("&quot;phase&quot;: &quot;ended&quot;" in card for card in cards):
        return "no card shows the end of its job"
    return None


def run(name: str) -> bool:
    """Executes one notebook; prints how that went."""
    begin = time.monotonic()
    book = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
    with tempfile.TemporaryDirectory(prefix=f"baton-{name}-") as folder:
        for shared in ["recipes", "assets"]:
            Path(folder, shared).symlink_to(ROOT / shared)
        if (ROOT / ".lora/models").is_dir():
            Path(folder, "models").symlink_to(ROOT / ".lora/models")
        try:
            asyncio.run(execute(book, Path(folder)))
            failure = problem(book)
        except CellExecutionError as error:
            failure = str(error)
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, OUTPUTS / f"{name}.ipynb")
    print(f"{'FAILED' if failure else 'ok':7} {name} ({time.monotonic() - begin:.1f} s)", flush=True)
    if failure:
        print(failure)
    return failure is None


os.environ["PATH"] = f"{os.environ['BATON_BIN']}{os.pathsep}{os.environ['PATH']}"
results = [run(name) for name in sys.argv[1:]]
sys.exit(0 if results and all(results) else 1)

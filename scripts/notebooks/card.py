"""Tests the card of a job in a real JupyterLab: card.py SCRIPT, which is crates/dashboard/browser/notebook.js beside its packages.

Needs jupyterlab, Baton's programs in BATON_BIN, and the browser that CHROMIUM names.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import nbformat
from jupyter_server.serverapp import list_running_servers

ROOT = Path(__file__).resolve().parents[2]
CELLS = [
    'import baton\n\njob = baton.up("digits_cpu", set={"train.epochs": 100_000}, run_dir="run")\njob',
    'job.drain()\nprint(job.wait()["reason"])',
]
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
START_SECONDS = 60


def address_of(server: subprocess.Popen[bytes]) -> str:
    """Waits until the server answers."""
    while server.poll() is None:
        for running in list_running_servers():
            # It is listed before it listens.
            with contextlib.suppress(OSError), urllib.request.urlopen(running["url"] + "api", timeout=START_SECONDS):
                return str(running["url"]).rstrip("/")
        time.sleep(0.1)
    sys.exit(f"JupyterLab ended with exit code {server.returncode}")


with tempfile.TemporaryDirectory(prefix="baton-card-") as folder:
    for shared in ["recipes", "assets"]:
        Path(folder, shared).symlink_to(ROOT / shared)
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL), Path(folder, "card.ipynb"))
    for variable in ["IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"]:
        os.environ[variable] = str(Path(folder, "jupyter", variable))
    settings = ["--no-browser", "--allow-root", "--ip=127.0.0.1"]
    settings += ["--IdentityProvider.token=", "--LabApp.news_url=None", "--ServerApp.password="]
    with open(Path(folder, "jupyter.log"), "wb") as log:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *settings], cwd=folder, stdout=log, stderr=log)
    try:
        code = subprocess.run(["node", sys.argv[1], address_of(server), "card.ipynb"], check=False).returncode
    finally:
        server.terminate()
        server.wait()
        drain = [Path(os.environ["BATON_BIN"], "baton"), "drain", "--run-dir", Path(folder, "run")]
        subprocess.run(drain, check=False, capture_output=True)
    if code != 0:
        print(Path(folder, "jupyter.log").read_text(errors="replace")[-4000:])
sys.exit(code)

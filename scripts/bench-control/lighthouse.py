"""Serves torchft's lighthouse, prints its address, and waits to be killed.

    lighthouse.py DIR      where pip put torchft

Only its compiled part is loaded: the Python package requires PyTorch, which the lighthouse does not use.
"""

import importlib.machinery
import importlib.util
import signal
import sys
from pathlib import Path

program = next(Path(sys.argv[1], "torchft").glob("_torchft*.so"))
loader = importlib.machinery.ExtensionFileLoader("_torchft", str(program))
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_torchft", loader))
loader.exec_module(module)
lighthouse = module.LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
port = lighthouse.address().rpartition(":")[2]
print(f"http://127.0.0.1:{port}", flush=True)
signal.pause()

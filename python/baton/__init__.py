"""Writes PyTorch networks for Baton, and shows that Baton computes what PyTorch computes.

    import baton

    baton.export(model, example, "net.pt2")
    print(baton.compare(model, (inputs, target)))

`export` writes a program: the graph in training mode and the weights, in one file. `compare` runs one training step in
Baton and in PyTorch, and lists how far loss, outputs, gradients and running statistics are apart.

Both use Baton's programs `baton` and `baton-worker`. They are searched in the folder that the environment variable
BATON_BIN names, beside the Python that runs, and on PATH.
"""

from baton._compare import compare
from baton._comparison import Comparison, Difference
from baton._export import ExportSummary, export
from baton._failure import ExportError
from baton._version import VERSION as __version__

__all__ = ["Comparison", "Difference", "ExportError", "ExportSummary", "__version__", "compare", "export"]

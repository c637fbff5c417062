"""Writes PyTorch networks for Baton.

    import baton

    baton.export(model, example, "net.pt2")

`export` writes a program: the graph in training mode and the weights, in one file. Baton's program `baton` checks it. It
is searched in the folder that the environment variable BATON_BIN names, beside the Python that runs, and on PATH.
"""

from baton._export import ExportSummary, export
from baton._failure import ExportError
from baton._version import VERSION as __version__

__all__ = ["ExportError", "ExportSummary", "__version__", "export"]

"""Baton from Python: writes data sets, starts and watches jobs, reads their results, and exports PyTorch networks.

    import baton

    job = baton.up("digits_cpu", set={"train.epochs": 3})  # a process of its own; attach() finds it again
    job.wait()
    job.run.evaluations()  # rows for pandas

    baton.export(model, example, "net.pt2")
    print(baton.compare(model, (inputs, target)))

`export` writes a program: the graph in training mode and the weights, in one file. `compare` runs one training step in
Baton and in PyTorch, and lists how far loss, outputs, gradients and running statistics are apart.

All use Baton's programs `baton` and `baton-worker`. They are searched in the folder that the environment variable
BATON_BIN names, beside the Python that runs, and on PATH.
"""

from baton._beton import BetonDataset, write_beton
from baton._compare import compare
from baton._comparison import Comparison, Difference
from baton._export import ExportSummary, export
from baton._failure import ExportError
from baton._job import Job, attach, up
from baton._programs import JobError
from baton._run import Run
from baton._version import VERSION as __version__

__all__ = [
    "BetonDataset",
    "Comparison",
    "Difference",
    "ExportError",
    "ExportSummary",
    "Job",
    "JobError",
    "Run",
    "__version__",
    "attach",
    "compare",
    "export",
    "up",
    "write_beton",
]

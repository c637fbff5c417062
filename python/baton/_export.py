"""Writes a program: a network as `torch.export` sees it, with what Baton needs to know about it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton import _arguments, _programs
from baton._failure import ExportError, explain
from baton._version import VERSION

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

# Version of the entry `baton.json`; crates/program/src/metadata.rs reads it.
_FORMAT_VERSION = 1
# A size: a number, or `None` for the number of samples and for what depends on it.
_Shape = tuple["int | None", ...]


@dataclass(frozen=True)
class ExportSummary:
    """What `export` wrote; `print` shows it in a few lines."""

    path: Path
    """The file."""
    task: str
    """`classification` or `regression`."""
    inputs: dict[str, tuple[str, _Shape]]
    """Type of the elements and shape by name of the input; `None` is a size that may change."""
    output: _Shape
    """Shape of the output."""
    parameters: int
    """Number of values of all parameters, a shared one counted once."""
    trained_parameters: int
    """Number of those with `requires_grad`."""
    checked_by: Path | None
    """The program that accepted the file; `None` if it was not checked, and a warning says why."""

    def __str__(self) -> str:
        inputs = ", ".join(f"{name} {dtype} {_shape_text(shape)}" for name, (dtype, shape) in self.inputs.items())
        checked = f"accepted by {self.checked_by}" if self.checked_by else "not checked"
        return (
            f"{self.path}: {checked}\n"
            f"  task        {self.task}\n"
            f"  input       {inputs}\n"
            f"  output      {_shape_text(self.output)}\n"
            f"  parameters  {self.parameters:,}, {self.trained_parameters:,} trained"
        )


def export(
    model: torch.nn.Module,
    example: torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    task: str = "classification",
    classes: int | Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    max_samples: int = 4096,
) -> ExportSummary:
    """Writes a model to a file that Baton trains, and checks the file with the program `baton`.

    The file holds the graph of the model in training mode and its weights, with which training begins. The names of the
    state dict stay as they are, so that `model.load_state_dict` takes the trained weights. The example's values are not
    in the file.

    Modules keep their modes: a model in evaluation mode is exported in training mode, and is in evaluation mode again
    afterwards. If a part of the model is in training mode, everything is exported in the mode that it has; so a
    BatchNorm in evaluation mode keeps its statistics.

    Args:
        model: returns one float32 tensor of shape (samples, outputs): scores of classes, or values of a regression. All
            parameters are float32 and on one device.
        example: a tensor, a tuple of tensors or a dict of named tensors, as `forward` takes them, on the model's device.
            The first axis counts samples, at least 2. Only shapes and dtypes matter; all other axes are fixed to these
            sizes.
        path: the file, which ends with `.pt2`. It is replaced at once, and only by a program that was accepted.
        task: "classification" or "regression".
        classes: their number, or their names in the order of the outputs; kept in the file.
        mean: of each channel of the images, by which the model expects them to be normalised; in units of 0..255, as
            `data.mean` of a recipe. Kept in the file; Baton refuses a recipe that says something else.
        std: the same for the standard deviation.
        max_samples: most samples of a batch, of training and of evaluation.

    Returns:
        What was written.

    Raises:
        TypeError, ValueError: an argument cannot be used; nothing was exported.
        OSError: there is no such folder, or it cannot be written; or BATON_BIN is a folder without `baton`.
        ExportError: the model cannot be exported, or Baton cannot train it; a file that was there before is unchanged.

    Warns:
        UserWarning: the file was not checked, because there is no program `baton`, or it is not Baton's.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}: give an nn.Module")
    _arguments.module(model)
    _arguments.task(task)
    path = _arguments.target(path)
    inputs = _arguments.inputs(model, example, torch.Tensor)
    _arguments.samples(inputs, max_samples)
    _arguments.devices(model, inputs)
    count, names = _arguments.class_names(classes, task)
    normalisation = _arguments.normalisation(mean, std, inputs)
    checker = _programs.find("baton")

    program, outputs = trace(model, inputs, max_samples)
    output: _Shape = (None, outputs)
    if count is not None and outputs != count:
        raise ExportError(
            f"the model returns {_shape_text(output)}, but classes are {count}: one output for each class"
        )
    described = {name: (_arguments.dtype_name(tensor), _open_shape(tensor)) for name, tensor in inputs.named().items()}
    metadata: dict[str, Any] = {
        "format_version": _FORMAT_VERSION,
        "task": task,
        "inputs": [{"name": name, "dtype": dtype, "shape": shape} for name, (dtype, shape) in described.items()],
        "output": {"shape": output},
        "torch_version": torch.__version__,
        "baton_version": VERSION,
    }
    if names:
        metadata["class_names"] = names
    if normalisation:
        metadata["mean"], metadata["std"] = normalisation
    with _replacing(path) as part:
        torch.export.save(program, part, extra_files={"baton.json": json.dumps(metadata)})
        is_checked = checker is not None and _is_accepted(checker, part, path)
    if checker is None:
        warnings.warn(
            f"{path} was not checked, because no program baton was found: set {_programs.FOLDER_VARIABLE} to the folder "
            "of Baton's programs, or run `baton model inspect` on it",
            stacklevel=2,
        )
    parameters = list(model.parameters())
    return ExportSummary(
        path=path,
        task=task,
        inputs=described,
        output=output,
        parameters=sum(parameter.numel() for parameter in parameters),
        trained_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        checked_by=checker if is_checked else None,
    )


def trace(model: torch.nn.Module, inputs: _arguments.Inputs, max_samples: int) -> tuple[ExportedProgram, int]:
    """The graph in training mode, for any number of samples up to `max_samples`, and its outputs per sample."""
    import torch

    samples = torch.export.Dim("batch", min=_arguments.MIN_SAMPLES, max=max_samples)
    # The caller's settings would be part of the graph; a recipe sets the number format.
    with in_training_mode(model), torch.enable_grad(), without_autocast(inputs):
        try:
            program = torch.export.export(model, inputs.args, inputs.kwargs, dynamic_shapes=inputs.like({0: samples}))
        except Exception as error:
            raise ExportError(explain(error, model)) from error
    # They would be in the file, and may be somebody's data.
    program.example_inputs = None
    return program, _outputs(program)


@contextlib.contextmanager
def in_training_mode(model: torch.nn.Module) -> Iterator[None]:
    """Puts a model that is in evaluation mode as a whole in training mode, and restores the modes afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not any(is_training for _, is_training in modes):
            model.train()
        yield
    finally:
        # Not by train(), which would set the modules inside too.
        for module, is_training in modes:
            module.training = is_training


def without_autocast(inputs: _arguments.Inputs) -> torch.autocast:
    """Turns autocast off for the inputs' device."""
    import torch

    device = next(iter(inputs.named().values())).device
    return torch.autocast(device.type, enabled=False)


def _outputs(program: ExportedProgram) -> int:
    """Outputs per sample, if the program returns one tensor of shape (samples, outputs)."""
    outputs = program.graph_signature.user_outputs
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    value = values.get(outputs[0]) if len(outputs) == 1 and isinstance(outputs[0], str) else None
    if not program.call_spec.out_spec.is_leaf() or value is None:
        raise ExportError(
            f"the model returns {len(outputs)} values or a container, but Baton trains one tensor of shape (samples, "
            "outputs): wrap it in a module whose forward returns that tensor"
        )
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    if len(shape) != 2 or shape[0] is not None or shape[1] is None:
        raise ExportError(f"the model returns {_shape_text(shape)}, but Baton trains an output of (samples, outputs)")
    return shape[1]


def _open_shape(tensor: torch.Tensor) -> _Shape:
    """Shape of an input whose first axis may change."""
    return (None, *tensor.shape[1:])


def _shape_text(shape: _Shape) -> str:
    """A shape such as `(samples, 3, 32, 32)`."""
    sizes = [str(size) if size is not None else "any" if axis else "samples" for axis, size in enumerate(shape)]
    return f"({', '.join(sizes)})"


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path for the content of a file. It replaces the file at once, and only if nothing fails."""
    # In a folder of its own it can have the final name, which PyTorch writes into the archive.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".baton-export-") as folder:
        part = Path(folder, path.name)
        yield part
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        os.replace(part, path)


def _is_accepted(checker: Path, part: Path, path: Path) -> bool:
    """Whether Baton accepts the file that will be at `path`; false if the program found is no Baton."""
    try:
        _programs.inspect(checker, part)
    except _programs.RefusedError as refused:
        raise ExportError(str(refused).replace(str(part), str(path))) from None
    except _programs.UnusableError as unusable:
        warnings.warn(f"{path} was not checked: {unusable}", stacklevel=3)
        return False
    return True

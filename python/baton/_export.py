"""Writes a program: a network as `torch.export` sees it, with what Baton needs to know about it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton import _arguments, _faithful, _programs, _state
from baton._failure import ExportError, explain
from baton._version import VERSION

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

# Version of the entry `baton.json`; crates/program/src/metadata.rs reads it.
_FORMAT_VERSION = 1
# A size: a number, or `None` for the number of samples and for what depends on it.
_Shape = tuple["int | None", ...]
# Key of the loss in what the model returns.
_LOSS = "loss"
# Baton adds the numbers of all samples, so that the parts of a batch may have any size.
_NO_MEAN = 'leave out the mean or sum over the batch, for a loss with reduction="none"'
_MEAN_OF_SAMPLE = "average over each sample, for example with .reshape(target.shape[0], -1).mean(1)"
# A size, or how the number of samples decides it, such as `samples` or `8*samples`.
_Sizes = tuple["int | str", ...]


@dataclass(frozen=True)
class ExportSummary:
    """What `export` wrote; `print` shows it in a few lines."""

    path: Path
    """The file."""
    task: str
    """`classification`, `regression` or `loss`."""
    inputs: dict[str, tuple[str, _Shape]]
    """Type of the elements and shape by name of the input; `None` is a size that may change."""
    output: _Shape
    """Shape of the output; of the loss, if the model computes it."""
    metrics: tuple[str, ...]
    """Names of the metrics that the model returns beside the loss, in its order."""
    recipe: tuple[str, ...]
    """What a recipe needs for this program, as lines of TOML."""
    parameters: int
    """Number of values of all parameters, a shared one counted once."""
    trained_parameters: int
    """Number of those with `requires_grad`."""
    checked_by: Path | None
    """The program that accepted the file; `None` if it was not checked, and a warning says why."""

    def __str__(self) -> str:
        inputs = ", ".join(f"{name} {dtype} {_shape_text(shape)}" for name, (dtype, shape) in self.inputs.items())
        checked = f"accepted by {self.checked_by}" if self.checked_by else "not checked"
        output = _shape_text(self.output)
        if self.task == "loss":
            output = ", ".join(f"{name} {output}" for name in (_LOSS, *self.metrics))
        recipe = "\n              ".join(self.recipe)
        return (
            f"{self.path}: {checked}\n"
            f"  task        {self.task}\n"
            f"  input       {inputs}\n"
            f"  output      {output}\n"
            f"  parameters  {self.parameters:,}, {self.trained_parameters:,} trained\n"
            f"  recipe      {recipe}"
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
    in the file; a step of the program on them is compared with the model's, since `torch.export` drops what is not made of
    PyTorch's operators, such as the backward pass of a `torch.autograd.Function`.

    Modules keep their modes: a model in evaluation mode is exported in training mode, and is in evaluation mode again
    afterwards. If a part of the model is in training mode, everything is exported in the mode that it has; so a
    BatchNorm in evaluation mode keeps its statistics.

    Args:
        model: returns one tensor of shape (samples, outputs): scores of classes, or values of a regression. With
            task="loss", its `forward` has an argument `target`, and returns the loss of each sample, of shape (samples):
            alone, or in a dict with the key "loss" and metrics of the same shape under their names. All parameters are
            float32 and on one device.
        example: a tensor, a tuple of tensors or a dict of named tensors, as `forward` takes them, on the model's device.
            The first axis counts samples, at least 2. Only shapes and dtypes matter; all other axes are fixed to these
            sizes. With several inputs, the images, or else the first, are `data.input_field` of a recipe, and the others
            its `data.extra_fields`. With task="loss" it contains `target`.
        path: the file, which ends with `.pt2`. It is replaced at once, and only by a program that was accepted.
        task: "classification", "regression", or "loss" for a model that computes its loss itself.
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
    _arguments.target_input(model, inputs, task)
    _arguments.samples(inputs, max_samples)
    _arguments.devices(model, inputs)
    count, names = _arguments.class_names(classes, task)
    normalisation = _arguments.normalisation(mean, std, inputs)
    checker = _programs.find("baton")

    program = trace(model, inputs, max_samples)
    metrics = loss_metrics(program) if task == "loss" else ()
    outputs = None if task == "loss" else output_size(program)
    if count is not None and outputs != count:
        raise ExportError(f"the model returns (samples, {outputs}), but classes are {count}: one output for each class")
    extra: dict[str, Any] = {"class_names": names} if names else {}
    if normalisation:
        extra["mean"], extra["std"] = normalisation
    with _replacing(path) as part:
        save(program, part, task, inputs, outputs, extra)
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
        inputs=_described(inputs),
        output=_output(outputs),
        metrics=metrics,
        recipe=_recipe(path, model, task, inputs, outputs, metrics),
        parameters=sum(parameter.numel() for parameter in parameters),
        trained_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        checked_by=checker if is_checked else None,
    )


def trace(model: torch.nn.Module, inputs: _arguments.Inputs, max_samples: int) -> ExportedProgram:
    """The graph in training mode, for any number of samples up to `max_samples`."""
    import torch

    samples = torch.export.Dim("batch", min=_arguments.MIN_SAMPLES, max=max_samples)
    # The caller's settings would be part of the graph; a recipe sets the number format.
    with in_training_mode(model), torch.enable_grad(), without_autocast(inputs), _right_lstm_shapes():
        # Before torch.export, which calls the model and may leave such an attribute changed.
        if changed := _state.changing_attribute(model, inputs):
            raise ExportError(
                f"each call of the model changes {changed}, and a program would keep its value for ever: compute it from "
                "the inputs, or leave it out, also if it only counts"
            )
        try:
            program = torch.export.export(model, inputs.args, inputs.kwargs, dynamic_shapes=inputs.like({0: samples}))
        except Exception as error:
            raise ExportError(explain(error, model)) from error
        if problem := _faithful.problem(model, program, inputs):
            raise ExportError(problem)
    # They would be in the file, and may be somebody's data.
    program.example_inputs = None
    return program


def save(
    program: ExportedProgram,
    path: Path,
    task: str,
    inputs: _arguments.Inputs,
    outputs: int | None,
    extra: Mapping[str, Any],
) -> None:
    """Writes the program with what Baton needs to know about it; `outputs` is `None` if it returns the loss."""
    import torch

    described = _described(inputs).items()
    metadata = {
        "format_version": _FORMAT_VERSION,
        "task": task,
        "inputs": [{"name": name, "dtype": dtype, "shape": shape} for name, (dtype, shape) in described],
        "output": {"shape": _output(outputs)},
        "torch_version": torch.__version__,
        "baton_version": VERSION,
        **extra,
    }
    # In memory first: on a full disk PyTorch's writer ends the process, although the error was caught.
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={"baton.json": json.dumps(metadata)})
    path.write_bytes(content.getbuffer())


def _described(inputs: _arguments.Inputs) -> dict[str, tuple[str, _Shape]]:
    """Type of the elements and shape of each input, whose first axis may change."""
    return {name: (_arguments.dtype_name(tensor), (None, *tensor.shape[1:])) for name, tensor in inputs.named().items()}


def _output(outputs: int | None) -> _Shape:
    """Shape of the output, or of the loss."""
    return (None,) if outputs is None else (None, outputs)


def target_values(inputs: _arguments.Inputs) -> int:
    """Number of values of a sample's target, which is `model.num_classes` if the model computes the loss."""
    shape = inputs.named()[_arguments.TARGET].shape
    return int(shape[1:].numel())


def _recipe(
    path: Path,
    model: torch.nn.Module,
    task: str,
    inputs: _arguments.Inputs,
    outputs: int | None,
    metrics: Sequence[str],
) -> tuple[str, ...]:
    number = target_values(inputs) if outputs is None else outputs
    order = json.dumps(is_channels_last(model))
    network = f'arch = "program", program = {json.dumps(str(path))}, num_classes = {number}, channels_last = {order}'
    lines = [f"model = {{ {network} }}"]
    if task == "regression":
        lines.append('loss = { kind = "mse" }')
    if task == "loss":
        lines.append('loss = { kind = "program"' + (f", metrics = {json.dumps(metrics)}" if metrics else "") + " }")
    if fields := inputs.extra_fields(task):
        lines.append(f"data.extra_fields = {json.dumps(fields)}")
    if side := inputs.side(task):
        lines.append(f"train.resolution = {side}")
    return tuple(lines)


def is_channels_last(model: torch.nn.Module) -> bool:
    """Whether its convolutions have their weights in the order of channels_last, as then have their inputs."""
    return any(weight.dim() == 4 and not weight.is_contiguous() for weight in model.parameters())


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


@contextlib.contextmanager
def _right_lstm_shapes() -> Iterator[None]:
    """Corrects the shapes that PyTorch 2.11 traces for an LSTM's last states: they have an axis too many."""
    from torch._decomp import decompositions

    helper = getattr(decompositions, "_rnn_helper", None)
    if helper is None:  # Another version of PyTorch.
        yield
        return

    def corrected(*args: Any, **kwargs: Any) -> Any:
        output, states = helper(*args, **kwargs)
        # Those of a layer of an LSTM are two, each of shape (samples, features).
        pairs = (tuple(state.reshape(state.shape[-2:]) for state in pair) for pair in states if isinstance(pair, tuple))
        return output, list(pairs) or states

    decompositions._rnn_helper = corrected
    try:
        yield
    finally:
        decompositions._rnn_helper = helper


def without_autocast(inputs: _arguments.Inputs) -> torch.autocast:
    """Turns autocast off for the inputs' device."""
    import torch

    device = next(iter(inputs.named().values())).device
    return torch.autocast(device.type, enabled=False)


def output_size(program: ExportedProgram) -> int:
    """Outputs per sample of a program that returns one tensor of shape (samples, outputs)."""
    returned = _returned(program)
    if returned.keys() != {None}:
        raise ExportError(
            f"the model returns a dict of {_listed(returned)}, but Baton trains one tensor of shape (samples, outputs): "
            "wrap it in a module whose forward returns that tensor, or computes the loss, with task='loss'"
        )
    match returned[None]:
        case ("samples", int(outputs)):
            return outputs
        case shape:
            raise ExportError(
                f"the model returns {_shape_text(shape)}, but Baton trains an output of (samples, outputs)"
            )


def loss_metrics(program: ExportedProgram) -> tuple[str, ...]:
    """Names of the metrics of a program that returns the loss of each sample."""
    returned = _returned(program)
    if returned.keys() != {None} and _LOSS not in returned:
        raise ExportError(f"the model returns a dict of {_listed(returned)}: the key of the loss must be {_LOSS!r}")
    for name, shape in returned.items():
        if shape != ("samples",):
            remedy = _NO_MEAN if shape == () else _MEAN_OF_SAMPLE
            raise ExportError(
                f"the model returns {name or 'a loss'} of shape {_shape_text(shape)}, but it must be one number for each "
                f"sample: {remedy}"
            )
    metrics = tuple(name for name in returned if name is not None and name != _LOSS)
    for name in metrics:
        if not re.fullmatch("[a-z0-9_]+", name):
            raise ExportError(f"the metric {name!r} cannot be in a recipe: use lower-case letters, digits and _")
    return metrics


def _returned(program: ExportedProgram) -> dict[str | None, _Sizes]:
    """Shapes of what a program returns, by the keys of its dict; the key of a single tensor is `None`."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature, spec = program.graph_signature, program.call_spec.out_spec
    # What is no tensor has no value.
    outputs = [values.get(output) for output in signature.user_outputs if isinstance(output, str)]
    found = [value for value in outputs if value is not None]
    if spec.is_leaf():
        keys = [None]
    elif (
        spec.type is dict
        and all(isinstance(key, str) for key in spec.context)
        and all(child.is_leaf() for child in spec.children())
    ):
        keys = list(spec.context)
    else:
        keys = []
    number = len(signature.user_outputs)
    if not keys or not len(keys) == len(found) == number:
        raise ExportError(
            f"the model returns {_arguments.count(number, 'value')} in a {getattr(spec.type, '__name__', spec.type)}, "
            "but Baton takes one tensor, or a dict of a loss and metrics: wrap it in a module whose forward returns that "
            "tensor"
        )
    # The inputs agree on it; all arguments are tensors.
    first = next(node for node in program.graph.nodes if node.name in signature.user_inputs)
    samples = str(first.meta["val"].shape[0])

    def text(size: Any) -> int | str:
        return size if isinstance(size, int) else re.sub(rf"\b{samples}\b", "samples", str(size))

    return {key: tuple(map(text, value.shape)) for key, value in zip(keys, found)}


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names))


def _shape_text(shape: _Shape | _Sizes) -> str:
    """A shape such as `(samples, 3, 32, 32)`."""
    return f"({', '.join('samples' if size is None else str(size) for size in shape)})"


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path for the content of a file. It replaces the file at once, and only if nothing fails."""
    # In a folder of its own it can have the final name, which messages name.
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

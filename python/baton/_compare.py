"""One step of a model, in Baton and in PyTorch."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from baton import _arguments, _programs
from baton._comparison import Comparison, Difference, comparison
from baton._export import (
    in_training_mode,
    is_channels_last,
    loss_metrics,
    output_size,
    save,
    target_values,
    trace,
    without_autocast,
)

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

# Limit of the exported graph; a step of more would not fit into memory.
_MAX_SAMPLES = 1 << 20
# Probabilities of random layers that are numbers, as in nn.MultiheadAttention, nn.LSTM, torchvision's Swin and timm's
# DropPath. Layers that are dropout themselves call theirs `p`.
_PROBABILITIES = ("dropout", "attention_dropout", "attn_dropout", "dropout_p", "drop_prob")


def compare(
    model: torch.nn.Module,
    batch: tuple[torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor], torch.Tensor],
    *,
    task: str = "classification",
    label_smoothing: float = 0.0,
    worker: str | os.PathLike[str] | None = None,
    atol: float = 0.0,
    threads: int = 1,
) -> Comparison:
    """Computes one training step of a model in Baton and in PyTorch, and compares all results, on the CPU in float32.

    Compared are the loss, the outputs in training mode, the gradient of each trained parameter, and BatchNorm's running
    statistics after the step; and before it, as `evaluated`, the outputs in evaluation mode, in which a branch on
    `self.training` would differ: a program has that of training. The loss is the mean over the samples: cross entropy, or
    for a regression the squared error, averaged over a sample's outputs, or with task="loss" what the model returns; then
    the outputs are the loss of each sample and the metrics. Both sides sum over the samples and multiply by 1/samples, and
    both mix a batch's statistics into the running ones by `torch.lerp`; with one thread, they use the same kernels in the
    same order, so that all differences are 0.

    Random layers (dropout, stochastic depth, dropout of attention) are switched off, as Baton draws its own masks; the
    result lists them. The model is not changed.

    Args:
        model: as for `export`, on any device; a copy on the CPU is used.
        batch: the inputs (a tensor, a tuple of tensors or a dict of named tensors, at least 2 samples) and the target:
            int64 of shape (samples), or float32 of shape (samples, outputs) for a regression; with task="loss", as
            `forward` takes it.
        task: "classification", "regression", or "loss" for a model that computes its loss itself.
        label_smoothing: of the cross entropy, in [0, 1).
        worker: the program `baton-worker`; searched as `baton` is, if it is not given.
        atol: largest absolute difference that counts as equal.
        threads: threads of both sides. With several, kernels may sum in another order.

    Returns:
        The differences of all tensors; `print` shows a table.

    Raises:
        TypeError, ValueError: an argument cannot be used; the model draws random numbers that cannot be switched off,
            or changes itself in each call; or the loss is not finite.
        FileNotFoundError: there is no `baton-worker`.
        ExportError: the model cannot be exported.
        RuntimeError: Baton failed or did not compute a tensor that PyTorch did.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}: give an nn.Module")
    _arguments.module(model)
    _arguments.task(task)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError("batch is not a pair: give (inputs, target)")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is {label_smoothing}: it must be in [0, 1)")
    if label_smoothing and task != "classification":
        raise ValueError("label_smoothing is for classification: leave it out")
    if not atol >= 0:  # Also NaN, from which nothing is apart.
        raise ValueError(f"atol is {atol}: it must be at least 0")
    if not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads is {threads!r}: it must be at least 1")
    program = _worker(worker)

    model = copy.deepcopy(model).cpu()
    switched_off = _switch_random_layers_off(model)
    given, target = _on_cpu(batch[0]), _tensor_on_cpu(batch[1])
    if task == "loss":
        given = _arguments.with_target(model, given, target)
    inputs = _arguments.inputs(model, given, torch.Tensor, "batch")
    _arguments.target_input(model, inputs, task, "batch")
    samples = _arguments.samples(inputs, max_samples=_MAX_SAMPLES, name="batch")
    _check_target_type(target, samples, task)
    with _threads(threads), torch.random.fork_rng(devices=[]), in_training_mode(model), without_autocast(inputs):
        exported = trace(model, inputs, _MAX_SAMPLES)
        loss = _Loss(task, label_smoothing)
        if task == "loss":
            loss.metrics, outputs = loss_metrics(exported), target_values(inputs)
        else:
            outputs = output_size(exported)
            _check_target(target, outputs, task)
        _refuse_state_and_randomness(model, inputs, loss)
        with tempfile.TemporaryDirectory(prefix="baton-compare-") as folder:
            file = Path(folder, "model.pt2")
            save(exported, file, task, inputs, None if task == "loss" else outputs, {})
            recipe = _recipe(model, file, samples, outputs, loss, inputs)
            theirs = _probe(program, Path(folder), recipe, inputs, target, task, threads)
        evaluated = _evaluated(model, inputs, loss)
        ours = {**_eager(model, inputs, target, loss), "evaluated": evaluated}
    if not ours["loss"].isfinite():
        raise ValueError(
            f"the loss of this batch is {ours['loss'].item()}, and equal NaN would prove nothing: give finite inputs, "
            "targets and weights"
        )
    rows = differences(theirs, ours, _aliases(model))
    return comparison(rows, atol, threads, switched_off)


def _worker(given: str | os.PathLike[str] | None) -> Path:
    if given is None:
        found = _programs.find("baton-worker")
        problem = (
            f"no program baton-worker was found: set {_programs.FOLDER_VARIABLE} to the folder of Baton's programs"
        )
    else:
        path = shutil.which(given)
        found = Path(path) if path else None
        problem = f"worker is {os.fspath(given)}, which is no program"
    if found is None:
        raise FileNotFoundError(problem)
    return found


def _on_cpu(given: Any) -> Any:
    """Inputs on the CPU, contiguous as Baton reads them. What is no tensor is left to the checks."""
    if isinstance(given, Mapping):
        return {name: _on_cpu(value) for name, value in given.items()}
    if isinstance(given, (tuple, list)):
        return tuple(_on_cpu(value) for value in given)
    return _tensor_on_cpu(given)


def _tensor_on_cpu(given: Any) -> Any:
    return given.detach().cpu().contiguous() if hasattr(given, "detach") else given


def _check_target_type(target: Any, samples: int, task: str) -> None:
    import torch

    if not isinstance(target, torch.Tensor):
        raise TypeError(f"the target is of type {type(target).__name__}: give a tensor")
    fits = {
        "classification": target.dtype == torch.int64 and target.shape == (samples,),
        "regression": target.dtype == torch.float32 and target.dim() == 2 and len(target) == samples,
        # Data sets have integers and float32.
        "loss": target.dtype in (torch.float32, torch.int64),
    }
    if not fits[task]:
        expected = {
            "classification": f"int64 of shape ({samples},), the class of each sample",
            "regression": f"float32 of shape ({samples}, outputs)",
            "loss": "int64 or float32",
        }
        raise ValueError(
            f"the target is {_arguments.dtype_name(target)} of shape {tuple(target.shape)}, but a {task} needs "
            f"{expected[task]}"
        )


@dataclass
class _Loss:
    """How outputs become a loss."""

    task: str
    label_smoothing: float
    # Names of those that the model returns beside the loss.
    metrics: tuple[str, ...] = ()

    def outputs(self, returned: Any) -> torch.Tensor:
        """What Baton calls the outputs: with task="loss", the loss of each sample and its metrics."""
        import torch

        if self.task != "loss":
            return cast(torch.Tensor, returned)
        if isinstance(returned, torch.Tensor):
            return returned.float().unsqueeze(1)
        metrics = (returned[name].detach().float() for name in self.metrics)
        return torch.stack([returned["loss"].float(), *metrics], 1)

    def of(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean over the samples, with Baton's roundings."""
        import torch
        from torch.nn import functional

        if self.task == "loss":
            total = outputs.select(1, 0).sum()
        elif self.task == "regression":
            total = functional.mse_loss(outputs, target, reduction="sum") / outputs.shape[1]
        else:
            total = functional.cross_entropy(outputs, target, reduction="sum", label_smoothing=self.label_smoothing)
        # 1/samples is rounded to float32 before it is multiplied.
        return total * (torch.tensor(1.0) / len(target)).item()

    def recipe(self) -> dict[str, Any]:
        """Its table in a recipe."""
        if self.task == "loss":
            return {"kind": "program", "metrics": list(self.metrics)}
        if self.task == "regression":
            return {"kind": "mse"}
        return {"kind": "cross_entropy", "label_smoothing": float(self.label_smoothing)}


def _switch_random_layers_off(model: torch.nn.Module) -> list[str]:
    """Sets the probabilities of all known random layers to 0; returns the paths of those that had another one."""
    from torch.nn.modules.dropout import _DropoutNd

    changed = []
    for path, module in model.named_modules():
        names = [*_PROBABILITIES]
        if isinstance(module, _DropoutNd) or "StochasticDepth" in type(module).__name__:
            names.append("p")
        for name in names:
            value = getattr(module, name, 0)
            if isinstance(value, (int, float)) and value > 0:
                setattr(module, name, 0.0)
                changed.append(path or type(module).__name__)
    return changed


def _evaluated(model: torch.nn.Module, inputs: _arguments.Inputs, loss: _Loss) -> torch.Tensor:
    """The outputs in evaluation mode."""
    import torch

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    # Without gradients TransformerEncoderLayer has a fast path, which a program has not.
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            outputs = loss.outputs(inputs.call(model))
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
    for module, is_training in modes:
        module.training = is_training
    return outputs


def _eager(model: torch.nn.Module, inputs: _arguments.Inputs, target: torch.Tensor, loss: _Loss) -> Tensors:
    """What PyTorch computes, with the names of `baton-worker probe`. Changes the model's buffers and gradients."""
    import torch

    norms = _batch_norms(model)
    before = {name: buffer.clone() for name, buffer in _statistics(norms).items()}
    model.zero_grad()
    # With a momentum of 1 the kernel leaves the batch's own statistics in the buffers.
    momenta = {path: norm.momentum for path, norm in norms.items()}
    for norm in norms.values():
        norm.momentum = 1.0
    # A momentum of 1 multiplies the old value by 0, which would keep infinities and NaN.
    for buffer in _statistics(norms, in_training=True).values():
        buffer.zero_()
    with torch.enable_grad():
        output = loss.outputs(inputs.call(model))
        mean = loss.of(output, target)
    torch.autograd.backward(mean)
    results = {"loss": mean.detach(), "output": output.detach()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # A parameter that the loss does not depend on has none.
            results[f"grad.{name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    in_training = _statistics(norms, in_training=True)
    for name, value in before.items():
        if name in in_training:
            momentum = momenta[name.rpartition(".")[0]]
            value.lerp_(in_training[name], momentum)
        results[f"buffer.{name}"] = value
    return results


def _batch_norms(model: torch.nn.Module) -> dict[str, Any]:
    """The modules with running statistics, by path."""
    from torch.nn.modules.batchnorm import _BatchNorm

    norms = ((path, module) for path, module in model.named_modules() if isinstance(module, _BatchNorm))
    return {path: norm for path, norm in norms if norm.running_mean is not None}


def _statistics(norms: dict[str, Any], in_training: bool = False) -> Tensors:
    """The running statistics by their names in the state dict; of all norms, or only of those that update them."""
    return {
        f"{path}.{name}" if path else name: getattr(norm, name)
        for path, norm in norms.items()
        if norm.training or not in_training
        for name in ("running_mean", "running_var")
    }


def _refuse_state_and_randomness(model: torch.nn.Module, inputs: _arguments.Inputs, loss: _Loss) -> None:
    """Runs a copy of the model twice with one seed, and once with another: what differs is state, or is random."""
    import torch

    model, outputs = copy.deepcopy(model), []
    norms = _batch_norms(model)
    kept = {*_statistics(norms), *(f"{path}.num_batches_tracked" if path else "num_batches_tracked" for path in norms)}
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            outputs.append(torch.nan_to_num(loss.outputs(inputs.call(model))))
    changed = [
        name
        for name, buffer in model.named_buffers()
        if name not in kept and not torch.equal(buffer, before.get(name, buffer))
    ]
    if changed and not torch.equal(*outputs[:2]):
        raise ValueError(
            f"each call of the model changes {changed[0]} that the next one uses, and of buffers Baton keeps only "
            "BatchNorm's statistics: compute it from the inputs, or leave it out"
        )
    if not torch.equal(*outputs[:2]) or not torch.equal(*outputs[1:]):
        raise ValueError(
            "the model draws random numbers that cannot be switched off here, or keeps a value from call to call: give a "
            "copy without them, for example with a probability of 0"
        )


def _check_target(target: torch.Tensor, outputs: int, task: str) -> None:
    if task == "regression" and target.shape[1] != outputs:
        raise ValueError(f"the target has {target.shape[1]} values per sample, but the model returns {outputs}")
    if task == "classification" and not 0 <= int(target.min()) <= int(target.max()) < outputs:
        raise ValueError(f"the target has classes {target.min()}..{target.max()}, but the model has {outputs} outputs")


def _recipe(
    model: torch.nn.Module, file: Path, samples: int, outputs: int, loss: _Loss, inputs: _arguments.Inputs
) -> str:
    """A recipe of one virtual rank; the keys that a recipe must have, and what the step depends on."""
    fields = {"input_field": inputs.main(loss.task), "extra_fields": inputs.extra_fields(loss.task)}
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "arch": "program",
            "program": str(file),
            "num_classes": outputs,
            # Both sides must keep weights in the same order in memory.
            "channels_last": is_channels_last(model),
        },
        "data": {"train": "none", "val": "none", **fields},
        "train": {"epochs": 1, "global_batch": samples, "virtual_ranks": 1},
        "optimizer": {"kind": "sgd"},
        "schedule": {"kind": "constant", "lr": 0.1},
        "loss": loss.recipe(),
        "cluster": {"device": "cpu"},
    }
    lines = ['name = "compare"', *(f"{name} = {_toml(section)}" for name, section in sections.items())]
    return "\n".join(lines) + "\n"


def _toml(section: dict[str, Any]) -> str:
    """An inline table. Strings, numbers, truth values and lists of them are written as in JSON."""
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in section.items()) + " }"


def _probe(
    program: Path, folder: Path, recipe: str, inputs: _arguments.Inputs, target: torch.Tensor, task: str, threads: int
) -> Tensors:
    """What Baton computes."""
    from safetensors.torch import load_file, save_file

    named = inputs.named()
    tensors = {f"input.{name}": named[name].clone() for name in (inputs.main(task), *inputs.extra_fields(task))}
    recipe_file, batch_file, out = (folder / name for name in ("recipe.toml", "batch.safetensors", "probe.safetensors"))
    recipe_file.write_text(recipe, encoding="utf-8")
    save_file({**tensors, "target": target.clone()}, batch_file)
    command = [program, "probe", "--recipe", recipe_file, "--inputs", batch_file, "--out", out, "--threads", threads]
    try:
        done = _programs.run(command, {"OMP_NUM_THREADS": str(threads)})
    except _programs.UnusableError as unusable:
        raise RuntimeError(str(unusable)) from None
    if done.returncode != 0:
        said = _programs.first_line(done.stderr).removeprefix("error: ")
        raise RuntimeError(f"{program} probe ended with exit code {done.returncode}: {said or 'it printed nothing'}")
    if not out.is_file():
        raise RuntimeError(f"{program} probe wrote no results: use the programs of this package's version")
    results: Tensors = load_file(out)
    return results


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    """The first name of each parameter that several modules share, by its other names."""
    first: dict[int, str] = {}
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    return {f"grad.{name}": f"grad.{canonical}" for name, canonical in names.items() if name != canonical}


def differences(theirs: Tensors, ours: Tensors, aliases: Mapping[str, str]) -> list[Difference]:
    """Compares Baton's tensors with PyTorch's."""
    theirs = {aliases.get(name, name): tensor for name, tensor in theirs.items()}
    if missing := sorted(theirs.keys() ^ ours.keys()):
        side = "PyTorch" if missing[0] in theirs else "Baton"
        raise RuntimeError(f"{side} computed no {missing[0]}: the two sides do not run the same network")
    return [_difference(name, theirs[name], tensor) for name, tensor in ours.items()]


def _difference(name: str, found: torch.Tensor, expected: torch.Tensor) -> Difference:
    if found.shape != expected.shape:
        raise RuntimeError(f"Baton's {name} has shape {tuple(found.shape)}, PyTorch's {tuple(expected.shape)}")
    if found.numel() == 0:
        return Difference(name, 0.0, 0.0)
    found, expected = found.double(), expected.double()
    # Equal elements first: the difference of equal infinities, and of NaN on both sides, would be NaN.
    same = (found == expected) | (found.isnan() & expected.isnan())
    absolute = (found - expected).abs().masked_fill(same, 0.0).max().item()
    largest = expected.abs().max().item()
    relative = 0.0 if absolute == 0 else absolute / largest if largest else float("inf")
    return Difference(name, absolute, relative)


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """Sets PyTorch's number of threads inside one operation."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)

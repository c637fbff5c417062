"""Whether a program computes what the model computes: `torch.export` drops without a word what is not in PyTorch's operators."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from baton import _arguments, _state

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

# Largest difference of a gradient, as a share of its largest value. Other kernels of the same operators stay far below.
_TOLERANCE = 0.01
# How the names of outputs begin.
_OUTPUT = "output"


def problem(model: torch.nn.Module, program: ExportedProgram, inputs: _arguments.Inputs) -> str | None:
    """Why the program cannot be trained, or would be trained as another model, from one step of both on the example.

    `None` also where that cannot be said: the model cannot be called with the example's values, the result is not finite,
    or two steps of the model itself differ.
    """
    with _state.keeping_random_state():
        traced = program.module()
        try:
            with _keeping_buffers(traced):
                found = _step(traced, inputs)
        except Exception:  # The example need not have sensible values.
            return None
        if found is None:
            return (
                "no output of the exported program depends on a trained parameter through operators with a gradient: detach(), "
                "torch.no_grad(), comparisons and argmax have none, and torch.utils.checkpoint needs use_reentrant=False"
            )
        states = _states_outside_torch()
        try:
            expected = _step(copy.deepcopy(model), inputs)
        except Exception:  # The example need not have sensible values.
            return None
        if drawn := [name for name, state in _states_outside_torch().items() if state != states[name]]:
            return (
                f"forward draws random numbers from {drawn[0]}, and a program would keep one for ever: draw them with torch, "
                "for example torch.rand"
            )
        if name := _difference(model, expected, found, inputs):
            return (
                f"the exported program computes another {name} than the model: a torch.autograd.Function with a backward of its "
                "own, a hook on a tensor or module, or a value that forward keeps is not part of a program; write it with "
                "operators of PyTorch, for example x + (y - x).detach() for a straight-through estimator"
            )
        return _problem_of_one_sample(model, traced, inputs, found)


def _problem_of_one_sample(
    model: torch.nn.Module, traced: torch.nn.Module, inputs: _arguments.Inputs, several: dict[str, torch.Tensor]
) -> str | None:
    """Why the program cannot take a batch of one sample: `torch.export` has only looked at several.

    The last batch of an evaluation may have one, and so may a part of a batch in training.
    """
    samples = next(iter(inputs.named().values())).shape[0]
    inputs = inputs.first_sample()
    try:
        with _keeping_buffers(traced):
            found = _step(traced, inputs)
    except Exception as error:
        return (
            "the exported program fails for a batch of one sample, which the last one of an evaluation may be: "
            f"{(str(error).splitlines() or [type(error).__name__])[0]}; squeeze() without an axis and a branch on the number "
            "of samples do that: write forward for any number"
        )
    if found is None:
        return None
    for name, value in several.items():
        if not name.startswith(_OUTPUT) or value.shape[:1] != (samples,) or name not in found:
            continue
        if (shape := found[name].shape) != (1, *value.shape[1:]):
            expected = ", ".join(map(str, (1, *value.shape[1:])))
            return (
                f"for a batch of one sample, {name} has the shape ({', '.join(map(str, shape))}) in place of ({expected}): "
                "squeeze() without an axis removes that of the samples too; name the axis, as in squeeze(-1), or use flatten(1)"
            )
    try:
        of_model = _step(copy.deepcopy(model), inputs)
    except Exception:  # A BatchNorm needs several values in training.
        return None
    if different := _difference(model, of_model, found, inputs):
        return (
            f"for a batch of one sample, the exported program computes another {different} than the model: a program has one graph "
            "for any number of samples, and a branch on their number, such as `if x.shape[0] > 1`, keeps the side of several; "
            "compute the same for any number"
        )
    return None


def _difference(
    model: torch.nn.Module,
    expected: dict[str, torch.Tensor] | None,
    found: dict[str, torch.Tensor],
    inputs: _arguments.Inputs,
) -> str | None:
    """The first result that differs from what the model computed; `None` also if two steps of the model differ."""
    if expected is None or (name := _differing(expected, found)) is None:
        return None
    again = _step(copy.deepcopy(model), inputs)
    return None if again is None or _differing(expected, again) else name


@contextlib.contextmanager
def _keeping_buffers(traced: torch.nn.Module) -> Iterator[None]:
    """Restores the buffers of a program, which are the model's own."""
    import torch

    before = [(buffer, buffer.clone()) for buffer in traced.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _step(module: torch.nn.Module, inputs: _arguments.Inputs) -> dict[str, torch.Tensor] | None:
    """The outputs, and the gradients of a loss that weights all of them; `None` if no output has a gradient."""
    import torch
    from torch.utils import _pytree

    torch.manual_seed(0)

    def detached(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    args = [detached(value) for value in inputs.args]
    kwargs = {name: detached(value) for name, value in inputs.kwargs.items()}
    returned = [value for value in _pytree.tree_leaves(module(*args, **kwargs)) if isinstance(value, torch.Tensor)]
    results = {
        f"{_OUTPUT} {number}": value.detach() for number, value in enumerate(returned) if value.is_floating_point()
    }
    with_gradient = [value for value in returned if value.requires_grad]
    if not with_gradient:
        return None
    generator = torch.Generator().manual_seed(0)
    total: Any = 0
    for value in with_gradient:
        total = total + (value * torch.randn(value.shape, generator=generator).to(value)).sum()
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    for (name, parameter), gradient in zip(trained.items(), gradients):
        results[f"gradient of {name}"] = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
    return results


def _differing(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str | None:
    """The first result of both that differs. A parameter with several names may have another one on the other side."""
    for name, value in expected.items():
        other = found.get(name)
        if other is None or not value.numel() or not value.isfinite().all() or not other.isfinite().all():
            continue
        if other.shape != value.shape:
            return name
        if (other - value).abs().max() > _TOLERANCE * max(value.abs().max(), other.abs().max()):
            return name
    return None


def _states_outside_torch() -> dict[str, str]:
    """The states of the other generators that models use."""
    states = {"Python's random": repr(random.getstate())}
    if numpy := sys.modules.get("numpy"):
        states["numpy.random"] = repr(numpy.random.get_state())
    return states

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


def problem(model: torch.nn.Module, program: ExportedProgram, inputs: _arguments.Inputs) -> str | None:
    """Why the program cannot be trained, or would be trained as another model, from one step of both on the example.

    `None` also where that cannot be said: the model cannot be called with the example's values, the result is not finite,
    or two steps of the model itself differ.
    """
    with _state.keeping_random_state():
        if not _has_gradient(program, inputs):
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
        with _keeping_buffers(program.module()) as traced:
            found = _step(traced, inputs)
        name = _differing(expected, found)
        if name is None or _differing(expected, _step(copy.deepcopy(model), inputs)):
            return None
    return (
        f"the exported program computes another {name} than the model: a torch.autograd.Function with a backward of its own, "
        "a hook on a tensor or module, or a value that forward keeps is not part of a program; write it with operators "
        "of PyTorch, for example x + (y - x).detach() for a straight-through estimator"
    )


@contextlib.contextmanager
def _keeping_buffers(traced: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Restores the buffers of a traced module afterwards: they are the model's own."""
    import torch

    before = [(buffer, buffer.clone()) for buffer in traced.buffers()]
    try:
        yield traced
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _has_gradient(program: ExportedProgram, inputs: _arguments.Inputs) -> bool:
    """Whether an output has a gradient; true also if the program cannot be called with the example's values."""
    from torch.utils import _pytree

    with _keeping_buffers(program.module()) as traced:
        if not any(parameter.requires_grad for parameter in traced.parameters()):
            return True  # What is not trained is refused elsewhere.
        try:
            returned = _pytree.tree_leaves(_call(traced, inputs))
        except Exception:  # The example need not have sensible values.
            return True
    return any(getattr(value, "requires_grad", False) for value in returned)


def _call(module: torch.nn.Module, inputs: _arguments.Inputs) -> Any:
    args = [value.detach().clone() for value in inputs.args]
    return module(*args, **{name: value.detach().clone() for name, value in inputs.kwargs.items()})


def _step(module: torch.nn.Module, inputs: _arguments.Inputs) -> dict[str, torch.Tensor]:
    """The outputs, and the gradients of a loss that weights all of them."""
    import torch
    from torch.utils import _pytree

    torch.manual_seed(0)
    returned = [value for value in _pytree.tree_leaves(_call(module, inputs)) if isinstance(value, torch.Tensor)]
    results = {f"output {number}": value.detach() for number, value in enumerate(returned) if value.is_floating_point()}
    generator = torch.Generator().manual_seed(0)
    total: Any = torch.zeros((), requires_grad=True)  # The model may have no gradient although the program has one.
    for value in returned:
        if value.requires_grad:
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

"""Finds what a model's `forward` changes in the model itself, which a program or a step of Baton would not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from baton import _arguments

if TYPE_CHECKING:
    import torch

# What torch.export keeps as a number or text of the program.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def changing_attribute(model: torch.nn.Module, inputs: _arguments.Inputs) -> str | None:
    """An attribute of a module that each call of `forward` changes, such as a counter: its path and two values.

    Two calls are compared, so that what only the first one sets, such as a cache, does not count. They compute shapes
    alone, without the values of tensors, if the model allows that. `None` also if the model cannot be called.
    """
    for attempt in (_calls_of_shapes, _calls):
        try:
            first, second = attempt(model, inputs)
        except Exception:  # torch.export says why a model cannot run.
            continue
        for path, value in second.items():
            if path in first and first[path] != value:
                return f"{path} from {first[path]} to {value}"
        return None
    return None


_Attributes = dict[str, str]


def _calls_of_shapes(model: torch.nn.Module, inputs: _arguments.Inputs) -> tuple[_Attributes, _Attributes]:
    """The attributes after one call and after two, on the device `meta`, where tensors take no memory."""
    import torch

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta")

    # Keeps deepcopy from copying the weights.
    memo: dict[int, Any] = {id(buffer): shape_of(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(shape_of(parameter), requires_grad=parameter.requires_grad)
    with torch.device("meta"):
        return _called_twice(copy.deepcopy(model, memo), inputs, shape_of)


def _calls(model: torch.nn.Module, inputs: _arguments.Inputs) -> tuple[_Attributes, _Attributes]:
    with keeping_random_state():
        return _called_twice(copy.deepcopy(model), inputs, lambda tensor: tensor.clone())


def keeping_random_state() -> AbstractContextManager[None]:
    """Puts PyTorch's generators back as they were, at the end."""
    import torch

    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.random.fork_rng([torch.cuda.current_device()] if is_used else [])


def _called_twice(
    model: torch.nn.Module, inputs: _arguments.Inputs, given: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[_Attributes, _Attributes]:
    import torch

    args = [given(value) for value in inputs.args]
    kwargs = {name: given(value) for name, value in inputs.kwargs.items()}

    def called() -> _Attributes:
        model(*args, **kwargs)
        return _attributes(model)

    with torch.no_grad():
        return called(), called()


def _attributes(model: torch.nn.Module) -> _Attributes:
    """The plain attributes of all modules as text, by their path."""
    import torch

    standard = vars(torch.nn.Module()).keys()
    return {
        f"{path}.{name}" if path else name: repr(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in standard and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)

"""Checks of arguments before anything is computed. They need no PyTorch, only objects with its attributes."""

import inspect
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TASKS = ("classification", "regression", "loss")
# Argument of forward that takes the target, with task="loss".
TARGET = "target"
# torch.export fixes sizes of 0 and 1.
MIN_SAMPLES = 2
# Wrappers whose inner module is the one to export: name of the class, and where it keeps the module.
_WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}


class Inputs(NamedTuple):
    """The inputs of a batch, as `forward` takes them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # Values by the names of forward's parameters; `*args` and `**kwargs` are nested.
    bound: dict[str, Any]

    def named(self) -> dict[str, Any]:
        """The tensors, each with its name: `x`, or `images.0` for the first of `*images`."""
        return dict(_leaves(self.bound))

    def like(self, value: Any) -> dict[str, Any]:
        """The structure of the inputs, with `value` in place of each tensor."""
        return {name: _mapped(nested, lambda _: value) for name, nested in self.bound.items()}

    def first_sample(self) -> "Inputs":
        """The inputs of a batch of one sample."""
        return Inputs(*(_mapped(nested, lambda tensor: tensor[:1]) for nested in self))

    def call(self, model: Any) -> Any:
        """What the model returns for copies of the tensors, which it may change in place."""
        kwargs = {name: tensor.clone() for name, tensor in self.kwargs.items()}
        return model(*[tensor.clone() for tensor in self.args], **kwargs)

    def main(self, task: str) -> str:
        """Name of the input that takes `data.input_field` of a recipe: the images, or else the first."""
        names = [name for name in self.named() if name != TARGET or task != "loss"]
        return next((name for name in names if _is_images(self.named()[name])), names[0])

    def side(self, task: str) -> int | None:
        """Width and height of the images, in pixels, if they are images and both are the same."""
        main = self.named()[self.main(task)]
        height, width = main.shape[2:] if _is_images(main) else (0, 0)
        return int(height) if height == width and height > 0 else None

    def extra_fields(self, task: str) -> list[str]:
        """Names of the other inputs but the target, for `data.extra_fields` of a recipe."""
        others = {self.main(task), TARGET}
        return [name for name in self.named() if name not in others]


def _is_images(tensor: Any) -> bool:
    """Whether the shape is (samples, 3, height, width)."""
    return len(tensor.shape) == 4 and tensor.shape[1] == 3


def _leaves(nested: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(nested, dict):
        pairs = list(nested.items())
    elif isinstance(nested, tuple):
        pairs = list(enumerate(nested))
    else:
        return [(prefix, nested)]
    return [leaf for key, value in pairs for leaf in _leaves(value, f"{prefix}.{key}" if prefix else str(key))]


def _mapped(nested: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(nested, dict):
        return {key: _mapped(inner, change) for key, inner in nested.items()}
    if isinstance(nested, tuple):
        return tuple(_mapped(inner, change) for inner in nested)
    return change(nested)


def inputs(model: Any, given: Any, tensor_type: type, name: str = "example") -> Inputs:
    """A tensor, a tuple of tensors or a dict of named tensors in the form of a call. `name` is for messages."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(given, tensor_type):
        args = (given,)
    elif isinstance(given, Mapping):
        kwargs = dict(given)
    elif isinstance(given, (tuple, list)):
        args = tuple(given)
    else:
        raise TypeError(f"{name} is {_kind(given)}: give a tensor, a tuple of tensors, or a dict of named tensors")
    tensors = [*args, *kwargs.values()]
    if not tensors:
        raise ValueError(f"{name} is empty: give at least one tensor")
    for tensor in tensors:
        if not isinstance(tensor, tensor_type):
            raise TypeError(f"{name} contains a value {_kind(tensor)}: all inputs must be tensors")
    signature = inspect.signature(model.forward)
    # torch.export keeps the order of a dict, and the names in the file are those of forward's order.
    order = list(signature.parameters)
    kwargs = dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ValueError(f"{name} does not fit {type(model).__name__}.forward: {error}") from None
    return Inputs(args, kwargs, dict(bound))


def with_target(model: Any, given: Any, target: Any) -> dict[str, Any]:
    """Inputs in any of their forms, and the target, by the names of forward's parameters."""
    if isinstance(given, Mapping):
        return {**given, TARGET: target}
    tensors = given if isinstance(given, (tuple, list)) else (given,)
    names = [name for name in inspect.signature(model.forward).parameters if name != TARGET]
    if len(tensors) > len(names):
        raise ValueError(
            f"batch has {count(len(tensors), 'input')}, but {type(model).__name__}.forward takes {len(names)} and the target"
        )
    return {**dict(zip(names, tensors)), TARGET: target}


def target_input(model: Any, given: Inputs, task: str, name: str = "example") -> None:
    """Refuses a target that is missing, or that nothing would give to the model."""
    names = given.named().keys()
    if task == "loss" and TARGET not in names:
        raise ValueError(
            f"{name} has no {TARGET}: with task='loss', {type(model).__name__}.forward must have an argument {TARGET}, "
            f"and {name} must contain it"
        )
    if task == "loss" and len(names) == 1:
        raise ValueError(f"{name} has only the {TARGET}: the model must take another input too")
    if task != "loss" and TARGET in names and len(names) > 1:
        raise ValueError(
            f"{name} has an input {TARGET}, but a {task} takes none: set task='loss' if the model computes its loss, or "
            "rename the argument"
        )


def samples(given: Inputs, max_samples: int, name: str = "example") -> int:
    """The number of samples, which is the same for all inputs."""
    if not isinstance(max_samples, int) or max_samples < MIN_SAMPLES:
        raise ValueError(f"max_samples is {max_samples!r}: it must be an integer of at least {MIN_SAMPLES}")
    counts = {}
    for key, tensor in given.named().items():
        if len(tensor.shape) == 0:
            raise ValueError(f"{name}: {key} is a single number: the first axis must count samples")
        counts[key] = int(tensor.shape[0])
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{key} has {number}" for key, number in counts.items())
        raise ValueError(f"{name} has inputs with different numbers of samples ({listed}): the first axis counts them")
    number = next(iter(counts.values()))
    if number < MIN_SAMPLES:
        raise ValueError(
            f"{name} has {count(number, 'sample')}, and torch.export would fix that number: give at least {MIN_SAMPLES}"
        )
    if number > max_samples:
        raise ValueError(f"{name} has {number} samples, more than max_samples = {max_samples}: raise max_samples")
    return number


def module(model: Any) -> None:
    """Refuses a module that Baton could not train as it is: wrapped, without weights, or not in float32."""
    kind = type(model).__name__
    if inner := _WRAPPERS.get(kind):
        raise TypeError(f"the model is wrapped in {kind}: give model.{inner}")
    if kind.endswith("ScriptModule"):
        raise TypeError("the model is a TorchScript module: give the nn.Module from which it was made")
    for name, parameter in model.named_parameters():
        if "Uninitialized" in type(parameter).__name__:
            raise ValueError(f"parameter {name} has no shape yet: call the model once with a batch")
        if str(parameter.device) == "meta":
            raise ValueError(f"parameter {name} is on the meta device and has no values: load the weights first")
        if str(parameter.dtype) != "torch.float32":
            raise ValueError(
                f"parameter {name} is {dtype_name(parameter)}, but Baton's master weights are float32: call "
                "model.float(), and set precision.compute in the recipe"
            )
        if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name} has a hook that may change its gradient, which a program cannot hold: remove it"
            )
    _separate_memory(model)
    if not any(parameter.requires_grad for _, parameter in model.named_parameters()):
        raise ValueError(f"{kind} has no parameter to train: set requires_grad of those that Baton trains")


def _separate_memory(model: Any) -> None:
    """Refuses parameters that share memory, other than one parameter under several names."""
    places: list[tuple[int, int, str]] = []
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        start = parameter.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride()))
        places.append((start, start + (last + 1) * parameter.element_size(), name))
    places.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(places):
        if start < end:
            raise ValueError(
                f"parameters {first} and {second} are two objects with the same memory, and would be trained as two: assign "
                "the same nn.Parameter to both, or .clone() one of them"
            )


def devices(model: Any, given: Inputs, name: str = "example") -> None:
    """Refuses a model on several devices, and inputs on another one."""
    held = [*model.named_parameters(), *model.named_buffers()]
    places = {str(tensor.device): key for key, tensor in held}
    if len(places) > 1:
        listed = ", ".join(f"{key} on {device}" for device, key in places.items())
        raise ValueError(f"the model is on several devices ({listed}): move it to one with model.to(device)")
    if not places:
        return
    (device,) = places
    for key, tensor in given.named().items():
        if str(tensor.device) != device:
            raise ValueError(
                f"{name}: {key} is on {tensor.device}, but the model on {device}: move it with .to({device!r})"
            )


def task(value: str) -> None:
    if value not in TASKS:
        raise ValueError(f"task is {value!r}: it must be {', '.join(map(repr, TASKS[:-1]))} or {TASKS[-1]!r}")


def class_names(classes: Any, task: str) -> tuple[int | None, list[str]]:
    """The number of classes, if it is given, and their names, if they have some."""
    if classes is None:
        return None, []
    if task != "classification":
        raise ValueError(f"classes are given for a {task}: leave them out, or set task='classification'")
    if isinstance(classes, int) and not isinstance(classes, bool):
        names, number = [], classes
    elif isinstance(classes, Sequence) and not isinstance(classes, str):
        names, number = list(classes), len(classes)
    else:
        raise TypeError(f"classes is {_kind(classes)}: give their number, or a list of their names")
    if number < 2:
        raise ValueError(f"classes are {number}: a classification has at least 2")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"class name {name!r} is {_kind(name)}: names are strings")
        if not name.isprintable() or not name.strip():
            raise ValueError(f"class name {name!r} is empty or cannot be printed: give it another")
    for name, occurrences in Counter(names).items():
        if occurrences > 1:
            raise ValueError(f"class name {name!r} occurs {occurrences} times: each class needs its own")
    return number, names


def normalisation(mean: Any, std: Any, given: Inputs) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation per channel, in units of 0..255; `None` if they are not given."""
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise ValueError("mean and std go together: give both or none")
    tensors = list(given.named().values())
    if not any(map(_is_images, tensors)):
        raise ValueError(
            "mean and std are for images of shape (samples, 3, height, width), but the input is "
            f"{tuple(tensors[0].shape)}: leave them out"
        )
    both = []
    for name, values in (("mean", mean), ("std", std)):
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):
            raise TypeError(f"{name} is {values!r}: give three numbers, one per channel") from None
        if len(numbers) != 3 or not all(map(math.isfinite, numbers)):
            raise ValueError(f"{name} is {numbers}: give three finite numbers, one per channel")
        both.append(numbers)
    if min(both[1]) <= 0:
        raise ValueError(f"std is {both[1]}: each must be above 0")
    if max(both[1]) < 1:
        raise ValueError(
            f"std is {both[1]}, but mean and std are in units of 0..255, as data.mean and data.std of a recipe: "
            "multiply both by 255"
        )
    return both[0], both[1]


def target(path: str | os.PathLike[str]) -> Path:
    """Where the program is written."""
    found = Path(path)
    if found.suffix != ".pt2":
        raise ValueError(f"path is {found}: its name must end with .pt2")
    if not found.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {found.parent}: create it first")
    if found.is_dir():
        raise IsADirectoryError(f"{found} is a folder: give the name of a file")
    return found


def dtype_name(tensor: Any) -> str:
    """PyTorch's name of the type of the elements, e.g. `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"


def count(number: int, noun: str) -> str:
    """A number of things, e.g. `2 samples`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

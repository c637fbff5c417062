"""Why an export failed, and what to do."""

import os
import re
import traceback
from typing import Any


class ExportError(RuntimeError):
    """The model cannot be exported, or Baton cannot train it. The text says where and what to do.

    If PyTorch failed, its own error is the `__cause__`.
    """


# What PyTorch's error says, and what to do about it; the first that is found. The names are those of its errors.
_REMEDIES = [
    (
        r"data-dependent|DataDependent",
        "the computation depends on values of a tensor (.item(), int(tensor), or a tensor in an if): keep it in tensors, "
        "for example with torch.where",
    ),
    (
        r"Constraints violated",
        "the code fixes the number of samples, for example by len(x), by a reshape with a number, or by comparing "
        "x.shape[0] with one: use x.shape[0], -1 or x.flatten(1) instead",
    ),
    (
        r"fake impl|UnsupportedOperator|Meta' backend|FakeTensor",
        "an operator has no kernel for shapes alone, which custom operators often lack: write it with PyTorch's operators",
    ),
    (
        r"numpy|tensor subclasses",
        "the computation leaves PyTorch: write it with PyTorch's operators",
    ),
]
_OTHERWISE = "check that model(example) runs in training mode"


def explain(error: BaseException, model: Any) -> str:
    """One paragraph about a failure of torch.export: where, what PyTorch says, and what to do."""
    said = _first_paragraph(str(error))
    searched = f"{type(error).__name__} {error}"
    remedy = next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, searched)), _OTHERWISE)
    where = location(error, model)
    return (
        f"torch.export failed{f' in {where}' if where else ''}: {remedy}. PyTorch says: {said or type(error).__name__}"
    )


def _first_paragraph(text: str) -> str:
    """The part before advice for developers of PyTorch, in one line."""
    paragraph = re.split(r"\n\s*\n|\nFor more information|\nSuggested fixes", text.strip(), maxsplit=1)[0]
    paragraph = re.sub(r"For more information, run with TORCH_LOGS=\S+", "", paragraph)
    return " ".join(paragraph.split())


def location(error: BaseException, model: Any) -> str:
    """The innermost module that ran, and the last line of code that is not PyTorch's; empty if no module ran.

    torch.export runs the module's Python code, so that the frames are in the traceback.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    module = line = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        # A bound method has its module as `self`; PyTorch's own __call__ too.
        owner = frame.f_locals.get("self")
        if id(owner) in paths:
            module = paths[id(owner)] or type(owner).__name__
        file = frame.f_code.co_filename
        # What comes before the first module is the caller's code and this package.
        if module is not None and f"-packages{os.sep}torch{os.sep}" not in file:
            line = f"{os.path.basename(file)}, line {number}"
    if module is None:
        return ""
    return f"module {module}" + (f" ({line})" if line else "")

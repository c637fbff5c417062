"""Explanations of PyTorch's errors. The errors are those of PyTorch 2.11, shortened."""

import pytest
from baton._failure import explain

DATA_DEPENDENT = """Could not guard on data-dependent expression Eq(u0, 1) (unhinted: Eq(u0, 1)).  (Size-like symbols: none)

consider using data-dependent friendly APIs such as guard_or_false, guard_or_true and statically_known_true.
For more information, run with TORCH_LOGS="dynamic"

The error above occurred when calling torch.export.export."""
SPECIALIZED_INTEGER = """Could not extract specialized integer from data-dependent expression u0 (unhinted: u0)."""
FIXED = """Constraints violated (batch)! For more information, run with TORCH_LOGS="+dynamic".
  - You marked batch as dynamic but your code specialized it to be a constant (3).
Suggested fixes:
  batch = 3

The error above occurred when calling torch.export.export."""
NO_FAKE = """There was no fake impl registered for <CustomOpDef(mylib::f)>. This is necessary for torch.compile.

The error above occurred when calling torch.export.export."""


class Layer:
    def forward(self, error):
        raise error


class Model:
    def __init__(self):
        self.layer = Layer()

    def named_modules(self):
        return [("", self), ("stem.layer", self.layer)]

    def forward(self, error):
        self.layer.forward(error)


def explained(error):
    model = Model()
    try:
        model.forward(error)
    except Exception as caught:
        return explain(caught, model)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (DATA_DEPENDENT, ["depends on values of a tensor", "torch.where", "data-dependent expression Eq(u0, 1)"]),
        (SPECIALIZED_INTEGER, ["depends on values of a tensor"]),
        (FIXED, ["fixes the number of samples", "x.flatten(1)", "specialized it to be a constant (3)."]),
        (NO_FAKE, ["no kernel for shapes alone", "PyTorch's operators", "mylib::f"]),
        (".numpy() is not supported for tensor subclasses.", ["the computation leaves PyTorch"]),
        ("mat1 and mat2 shapes cannot be multiplied", ["check that model(example) runs", "mat1 and mat2"]),
        ("", ["PyTorch says: RuntimeError"]),
    ],
)
def test_the_remedy_follows_from_what_pytorch_says(text, parts):
    found = explained(RuntimeError(text))
    for part in parts:
        assert part in found
    assert "\n" not in found
    assert "TORCH_LOGS" not in found and "error above" not in found and "Suggested" not in found


def test_the_innermost_module_and_the_last_line_are_named():
    found = explained(RuntimeError("no"))
    assert found.startswith("torch.export failed in module stem.layer (test_failure.py, line ")


def test_nothing_is_made_up_if_no_module_ran():
    assert explain(RuntimeError("no"), Model()).startswith("torch.export failed: check that")

"""What `baton.export` writes and refuses."""

import errno
import json
import os
import pathlib
import random
import zipfile

import baton
import numpy
import pytest
import torch
from networks import CLASSES, SIDE, Function, Small, Two, WithLoss, images, with_function
from torch import nn
from torch.utils.checkpoint import checkpoint


def metadata(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("archive/extra/baton.json"))


def export(model, path, example=None, **options):
    return baton.export(model, images() if example is None else example, path, **options)


@pytest.mark.usefixtures("accepting")
def test_the_file_says_what_the_numbers_mean(tmp_path):
    path = tmp_path / "net.pt2"
    names = ["ant", "bee", "cat", "dog", "Eichhörnchen"]
    summary = export(Small(), path, classes=names, mean=[77.9] * 3, std=torch.tensor([95.5] * 3), max_samples=64)
    assert metadata(path) == {
        "format_version": 1,
        "task": "classification",
        "inputs": [{"name": "image", "dtype": "float32", "shape": [None, 3, SIDE, SIDE]}],
        "output": {"shape": [None, CLASSES]},
        "class_names": names,
        "mean": [77.9] * 3,
        "std": [95.5] * 3,
        "torch_version": torch.__version__,
        "baton_version": baton.__version__,
    }
    assert summary.inputs == {"image": ("float32", (None, 3, SIDE, SIDE))}
    assert summary.output == (None, CLASSES)
    assert summary.parameters == sum(parameter.numel() for parameter in Small().parameters())
    assert f"{path}: accepted by " in str(summary)
    assert "input       image float32 (samples, 3, 8, 8)" in str(summary)
    model = f'model = {{ arch = "program", program = "{path}", num_classes = {CLASSES}, channels_last = false }}'
    size = f"train.resolution = {SIDE}"
    assert (summary.recipe, summary.metrics) == ((model, size), ())
    assert str(summary).endswith(f"\n  recipe      {model}\n              {size}")


@pytest.mark.usefixtures("accepting")
def test_weights_and_names_are_those_of_the_model_and_the_number_of_samples_is_open(tmp_path):
    path, model = tmp_path / "net.pt2", Small()
    model.fc.bias.requires_grad = False
    summary = export(model, path)
    assert summary.parameters - summary.trained_parameters == CLASSES
    program = torch.export.load(path)
    expected = model.state_dict()
    assert program.state_dict.keys() == expected.keys()
    assert all(torch.equal(program.state_dict[name], tensor) for name, tensor in expected.items())
    network = program.module()
    assert [len(network(images(samples))) for samples in (2, 7)] == [2, 7]
    # Dropout is on.
    assert not torch.equal(network(torch.ones(2, 3, SIDE, SIDE))[0], network(torch.ones(2, 3, SIDE, SIDE))[0])


@pytest.mark.usefixtures("accepting")
def test_the_values_of_the_example_are_not_in_the_file(tmp_path):
    path = tmp_path / "net.pt2"
    export(Small(), path, torch.full((2, 3, SIDE, SIDE), 0.123))
    assert torch.tensor(0.123).numpy().tobytes() * 4 not in path.read_bytes()
    assert torch.export.load(path).example_inputs in (None, ())


@pytest.mark.usefixtures("accepting")
def test_the_export_changes_neither_the_model_nor_the_random_numbers(tmp_path):
    model = Small().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    example, state = images(), torch.get_rng_state()
    export(model, tmp_path / "net.pt2", example)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module.training for module in model.modules())


def norm_trains(path):
    graph = torch.export.load(path).graph
    (norm,) = [node for node in graph.nodes if node.target is torch.ops.aten.batch_norm.default]
    return norm.args[5]


@pytest.mark.usefixtures("accepting")
def test_a_model_in_evaluation_mode_is_exported_in_training_mode(tmp_path):
    path, model = tmp_path / "net.pt2", Small().eval()
    with torch.no_grad():
        export(model, path)
    assert norm_trains(path)
    network = torch.export.load(path).module()
    assert network(images()).requires_grad


@pytest.mark.usefixtures("accepting")
def test_a_norm_in_evaluation_mode_stays_there_if_the_rest_trains(tmp_path):
    path, model = tmp_path / "net.pt2", Small().train()
    model.norm.eval()
    export(model, path)
    assert not norm_trains(path)
    assert model.training and not model.norm.training


@pytest.mark.usefixtures("accepting")
def test_modes_come_back_if_the_export_fails(tmp_path):
    model = with_function(lambda x: x.view(3, 4)).eval()
    with pytest.raises(baton.ExportError):
        export(model, tmp_path / "net.pt2", torch.randn(3, 4))
    assert not any(module.training for module in model.modules())
    assert os.listdir(tmp_path) == ["programs"]


@pytest.mark.usefixtures("accepting")
@pytest.mark.parametrize("names", [("left", "right"), ("right", "left")])
def test_several_inputs_are_named_in_the_order_of_forward(tmp_path, names):
    path = tmp_path / "net.pt2"
    example = {name: torch.randn(3, 4) for name in names}
    summary = export(Two(), path, example, task="regression")
    assert [entry["name"] for entry in metadata(path)["inputs"]] == ["left", "right"]
    # Names in the file are by position.
    program = torch.export.load(path)
    assert program.graph_signature.user_inputs == ("left", "right")
    assert program.module()(left=torch.randn(6, 4), right=torch.randn(6, 4)).shape == (6, CLASSES)
    assert summary.recipe[1:] == ('loss = { kind = "mse" }', 'data.extra_fields = ["right"]')


def with_loss_example(samples=4):
    return torch.rand(samples, 1), images(samples), torch.randint(0, CLASSES, (samples,))


@pytest.mark.usefixtures("accepting")
@pytest.mark.parametrize("form", [tuple, lambda example: dict(zip(("age", "image", "target"), example))])
def test_a_model_that_computes_its_loss_is_described_with_its_recipe(tmp_path, form):
    path = tmp_path / "net.pt2"
    summary = export(WithLoss(), path, form(with_loss_example()), task="loss", mean=[77.9] * 3, std=[95.5] * 3)
    found = metadata(path)
    assert (found["task"], found["output"], found["mean"]) == ("loss", {"shape": [None]}, [77.9] * 3)
    assert [(entry["name"], entry["dtype"], entry["shape"]) for entry in found["inputs"]] == [
        ("age", "float32", [None, 1]),
        ("image", "float32", [None, 3, SIDE, SIDE]),
        ("target", "int64", [None]),
    ]
    assert (summary.output, summary.metrics) == ((None,), ("accuracy", "probability_error"))
    # The images are the main input.
    assert summary.recipe == (
        f'model = {{ arch = "program", program = "{path}", num_classes = 1, channels_last = false }}',
        'loss = { kind = "program", metrics = ["accuracy", "probability_error"] }',
        'data.extra_fields = ["age"]',
        f"train.resolution = {SIDE}",
    )
    assert "output      loss (samples), accuracy (samples), probability_error (samples)\n" in str(summary)


@pytest.mark.usefixtures("accepting")
def test_the_number_of_samples_of_a_loss_is_open(tmp_path):
    export(WithLoss(), tmp_path / "net.pt2", with_loss_example(), task="loss")
    found = torch.export.load(tmp_path / "net.pt2").module()(*with_loss_example(7))
    assert {name: len(tensor) for name, tensor in found.items()} == {"accuracy": 7, "loss": 7, "probability_error": 7}


@pytest.mark.usefixtures("accepting")
def test_a_loss_alone_has_no_metrics_and_the_target_may_have_several_values(tmp_path):
    model = Function(lambda x, target: (x - target.flatten(1)).abs().mean(1))
    example = (torch.randn(3, 4), torch.randn(3, 1, CLASSES))
    for function in (model.function, lambda x, target: {"loss": model.function(x, target)}):
        summary = export(Function(function), tmp_path / "net.pt2", example, task="loss")
        assert summary.metrics == ()
        assert summary.recipe[0].endswith(f"num_classes = {CLASSES}, channels_last = false }}")
        assert summary.recipe[1:] == ('loss = { kind = "program" }',)


def loss_of(x, target, reduction="none"):
    return nn.functional.cross_entropy(x, target, reduction=reduction)


@pytest.mark.usefixtures("accepting")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x, y: loss_of(x, y, "mean"),
            "returns a loss of shape (), but it must be one number for each sample: leave",
        ),
        (
            lambda x, y: {"loss": loss_of(x, y, "sum")},
            'returns loss of shape (), but it must be one number for each sample: leave out the mean or sum over the batch, for a loss with reduction="none"',
        ),
        (
            lambda x, y: {"loss": loss_of(x, y), "accuracy": (x.argmax(1) == y).float().mean()},
            "returns accuracy of shape ()",
        ),
        (
            lambda x, y: {"loss": x.abs()},
            "returns loss of shape (samples, 5), but it must be one number for each sample: average over each sample, for example with .reshape(target.shape[0], -1).mean(1)",
        ),
        (lambda x, y: x.abs().flatten(), "returns a loss of shape (5*samples), but it must be one number"),
        (lambda x, y: {"mse": x.sum(1)}, "returns a dict of mse: the key of the loss must be 'loss'"),
        (
            lambda x, y: {"loss": x.sum(1), "Top-1": x.sum(1)},
            "the metric 'Top-1' cannot be in a recipe: use lower-case letters, digits and _",
        ),
        (
            lambda x, y: (x.sum(1), x),
            "the model returns 2 values in a tuple, but Baton takes one tensor, or a dict of a loss and metrics",
        ),
        (lambda x, y: {"loss": x.sum(1), "parts": {"a": x.sum(1)}}, "the model returns 2 values in a dict"),
        (lambda x, y: {"loss": x.sum(1), "scale": 2.0}, "the model returns 2 values in a dict"),
    ],
)
def test_what_is_no_loss_of_each_sample_is_refused_with_a_remedy(tmp_path, function, message):
    with pytest.raises(baton.ExportError) as caught:
        export(Function(function), tmp_path / "net.pt2", (torch.randn(3, 4), torch.tensor([0, 1, 2])), task="loss")
    assert message in str(caught.value)
    assert not (tmp_path / "net.pt2").exists()


@pytest.mark.usefixtures("no_programs")
def test_a_file_that_nobody_checked_is_kept_with_a_warning(tmp_path):
    with pytest.warns(
        UserWarning, match=r"net\.pt2 was not checked, because no program baton was found: set BATON_BIN"
    ):
        summary = export(Small(), tmp_path / "net.pt2")
    assert summary.checked_by is None
    assert "not checked" in str(summary)
    assert (tmp_path / "net.pt2").exists()


def test_a_file_that_baton_refuses_does_not_replace_another(programs, tmp_path):
    programs("baton", 'echo "error: program $4 uses a custom operator: replace it" >&2; exit 2')
    path = tmp_path / "net.pt2"
    path.write_text("old")
    with pytest.raises(baton.ExportError) as caught:
        export(Small(), path)
    assert str(caught.value) == f"program {path} uses a custom operator: replace it"
    assert path.read_text() == "old"


@torch.library.custom_op("baton_tests::no_kernel", mutates_args=())
def no_kernel(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pytest.mark.usefixtures("accepting")
@pytest.mark.parametrize(
    ("function", "where", "remedy"),
    [
        (lambda x: x if x.sum() > 0 else -x, "module 1 (test_export.py, line ", "for example with torch.where"),
        (lambda x: x[:, : int(x.abs().max().item()) + 1], "module 1 (test_export.py", "keep it in tensors"),
        (lambda x: x.view(3, 4), "", "the code fixes the number of samples"),
        (lambda x: x if x.shape[0] == 3 else -x, "", "use x.shape[0], -1 or x.flatten(1)"),
        (lambda x: x + torch.zeros(3, 1), "", "the code fixes the number of samples"),
        (lambda x: x.reshape(len(x), 2, 2).flatten(1), "", "by len(x)"),
        (no_kernel, "module 1 (", "an operator has no kernel for shapes alone"),
        (lambda x: torch.from_numpy(x.detach().numpy()), "module 1 (test_export.py", "the computation leaves PyTorch"),
        (lambda x: x @ torch.zeros(9, 9), "module 1 (test_export.py", "check that model(example) runs"),
    ],
)
def test_what_torch_export_refuses_gets_one_paragraph_with_a_remedy(tmp_path, function, where, remedy):
    with pytest.raises(baton.ExportError) as caught:
        export(with_function(function), tmp_path / "net.pt2", torch.randn(3, 4))
    text = str(caught.value)
    assert text.startswith(f"torch.export failed{' in ' if where else ''}{where}")
    assert remedy in text
    assert "PyTorch says: " in text and "\n" not in text
    assert caught.value.__cause__ is not None
    assert not (tmp_path / "net.pt2").exists()


@pytest.mark.usefixtures("accepting")
@pytest.mark.parametrize("wrap", [lambda x: {"scores": x}, lambda x: (x, x), lambda x: (x,)])
def test_a_model_that_does_not_return_one_tensor_is_refused(tmp_path, wrap):
    model = nn.Sequential(with_function(torch.relu), with_function(wrap)[1])
    with pytest.raises(baton.ExportError, match="wrap it in a module whose forward returns that tensor"):
        export(model, tmp_path / "net.pt2", torch.randn(3, 4))


@pytest.mark.usefixtures("accepting")
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.mean(), "()"),
        (lambda x: x.mean(1), "(samples)"),
        (lambda x: x.unsqueeze(2), "(samples, 5, 1)"),
        (lambda x: x[:2], "(2, 5)"),
        (lambda x: x.t(), "(5, samples)"),
        (lambda x: x.repeat(2, 1), "(2*samples, 5)"),
    ],
)
def test_an_output_of_another_shape_is_refused(tmp_path, function, shape):
    model = nn.Sequential(with_function(torch.relu), with_function(function)[1])
    with pytest.raises(baton.ExportError) as caught:
        export(model, tmp_path / "net.pt2", torch.randn(3, 4))
    assert str(caught.value) == f"the model returns {shape}, but Baton trains an output of (samples, outputs)"


@pytest.mark.usefixtures("accepting")
def test_each_class_needs_an_output(tmp_path):
    with pytest.raises(baton.ExportError, match=r"the model returns \(samples, 5\), but classes are 6: one output"):
        export(Small(), tmp_path / "net.pt2", classes=6)
    export(Small(), tmp_path / "net.pt2", classes=5)
    assert "class_names" not in metadata(tmp_path / "net.pt2")


def test_arguments_are_checked_before_the_export(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.export, "export", None)
    path = tmp_path / "net.pt2"
    with pytest.raises(TypeError, match=r"model is of type builtin_function_or_method: give an nn\.Module"):
        export(torch.relu, path)
    with pytest.raises(ValueError, match=r"parameter unused is float64, but Baton's master weights are float32"):
        export(Small().double(), path)
    with pytest.raises(ValueError, match="example has 1 sample"):
        export(Small(), path, images(1))
    with pytest.raises(ValueError, match="image is on meta, but the model on cpu"):
        export(Small(), path, images().to("meta"))
    with pytest.raises(ValueError, match="has no shape yet: call the model once"):
        export(nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES)), path)
    with pytest.raises(TypeError, match=r"wrapped in OptimizedModule: give model\._orig_mod"):
        export(torch.compile(Small()), path)
    with pytest.raises(ValueError, match=r"its name must end with \.pt2"):
        export(Small(), tmp_path / "net.pth")
    with pytest.raises(
        ValueError, match=r"example has no target: with task='loss', Small\.forward must have an argument"
    ):
        export(Small(), path, task="loss")
    with pytest.raises(ValueError, match="multiply both by 255"):
        export(Small(), path, mean=[0.5] * 3, std=[0.5] * 3)


class Annealed(nn.Module):
    """Counts its calls, and remembers a size at the first one."""

    def __init__(self, is_counting, values):
        super().__init__()
        self.fc, self.calls, self.size, self.is_counting = nn.Linear(4, CLASSES), [0], None, is_counting
        self.values = values

    def forward(self, x):
        self.size = self.size or x.shape[1]
        self.calls[0] += self.is_counting
        # Not on the device of x, as with many models.
        return self.fc(x) * min(1.0, self.calls[0] / 100 + 0.5) * self.values


@pytest.mark.usefixtures("accepting")
@pytest.mark.parametrize("values", [1.0, torch.ones(CLASSES)])
def test_a_value_that_each_call_changes_is_refused_and_one_of_the_first_call_is_not(tmp_path, values):
    model = nn.Sequential(Annealed(True, values), nn.Identity())
    with pytest.raises(baton.ExportError, match=r"each call of the model changes 0\.calls from \[1\] to \[2\]"):
        export(model, tmp_path / "net.pt2", torch.randn(3, 4))
    assert model[0].calls == [0]
    export(Annealed(False, values), tmp_path / "net.pt2", torch.randn(3, 4))


class Straight(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(context, x):
        return x.sign()

    @staticmethod
    def backward(context, gradient):
        return gradient


def reversed_gradient(x):
    y = x * 1
    y.register_hook(lambda gradient: -gradient)
    return y


class Between(nn.Module):
    """A layer after a function, and a random layer."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.function, self.drop = function, nn.Dropout(0.5)

    def forward(self, x):
        return self.last(self.drop(self.function(self.first(x))))


@pytest.mark.usefixtures("accepting")
@pytest.mark.parametrize("function", [Straight.apply, reversed_gradient])
def test_a_gradient_that_export_would_drop_is_refused(tmp_path, function):
    torch.manual_seed(1)
    with pytest.raises(baton.ExportError, match=r"computes another gradient of first\.weight than the model"):
        baton.export(Between(function), torch.randn(4, 6), tmp_path / "net.pt2")
    # The same with operators of PyTorch.
    baton.export(Between(lambda x: x + (x.sign() - x).detach()), torch.randn(4, 6), tmp_path / "net.pt2")


def without_gradient(x):
    with torch.no_grad():
        return x * 2


@pytest.mark.parametrize(
    "last", [torch.detach, without_gradient, lambda x: (x > 0).float()], ids=["detach", "no_grad", "comparison"]
)
def test_a_model_whose_output_has_no_gradient_is_refused(tmp_path, last):
    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, CLASSES)

        def forward(self, x):
            return last(self.fc(x))

    with pytest.raises(baton.ExportError, match="no output of the exported program depends on a trained parameter"):
        baton.export(Ends(), torch.randn(4, 6), tmp_path / "net.pt2")


@pytest.mark.usefixtures("accepting")
def test_a_reentrant_checkpoint_is_refused_and_another_is_not(tmp_path):
    class Checkpointed(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.before, self.inside, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
            self.options = options

        def forward(self, x):
            return self.last(checkpoint(self.inside, self.before(x), **self.options).relu())

    with pytest.raises(baton.ExportError, match="needs use_reentrant=False"):
        baton.export(Checkpointed(use_reentrant=True), torch.randn(4, 6), tmp_path / "net.pt2")
    baton.export(Checkpointed(use_reentrant=False), torch.randn(4, 6), tmp_path / "net.pt2")


class LastStates(nn.Module):
    """Classifies sequences by the last states of an LSTM, as `pick` takes them from h and c."""

    def __init__(self, pick, width, **options):
        super().__init__()
        self.rnn = nn.LSTM(4, 8, batch_first=True, **options)
        self.pick, self.fc = pick, nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.fc(self.pick(*self.rnn(x)[1]))


LAST_STATES = {
    "hidden": lambda: LastStates(lambda h, _c: h[-1], 8),
    "both directions": lambda: LastStates(lambda h, _c: torch.cat([h[-2], h[-1]], 1), 16, bidirectional=True),
    "all layers": lambda: LastStates(lambda _h, c: c.permute(1, 0, 2).flatten(1), 16, num_layers=2),
    "projected": lambda: LastStates(lambda h, c: torch.cat([h[0], c[0]], 1), 13, proj_size=5),
}


@pytest.mark.usefixtures("accepting")
@pytest.mark.parametrize("name", LAST_STATES)
def test_the_last_states_of_an_lstm_have_their_right_shapes(tmp_path, name):
    summary = baton.export(LAST_STATES[name](), torch.randn(2, 9, 4), tmp_path / "net.pt2")
    assert summary.output == (None, CLASSES)
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    assert loaded(torch.randn(5, 9, 4)).shape == (5, CLASSES)


@pytest.mark.parametrize("draw", [random.random, lambda: float(numpy.random.rand())])
def test_numbers_drawn_outside_of_torch_are_refused(tmp_path, draw):
    with pytest.raises(baton.ExportError, match=r"draws random numbers from (Python's random|numpy\.random)"):
        baton.export(Between(lambda x: x * draw()), torch.randn(4, 6), tmp_path / "net.pt2")


@pytest.mark.usefixtures("accepting")
def test_a_check_of_gradients_changes_neither_the_model_nor_the_program(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    example, state = torch.randn(4, 6), torch.get_rng_state()
    baton.export(model, example, tmp_path / "net.pt2")
    assert torch.equal(torch.get_rng_state(), state)
    exported = torch.export.load(tmp_path / "net.pt2").state_dict
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor), name
        assert torch.equal(exported[name], tensor), name


@pytest.mark.usefixtures("accepting")
def test_an_export_that_cannot_be_written_raises_an_error_of_the_file(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    folder = tmp_path / "full"
    folder.mkdir()
    with pytest.raises(OSError, match="No space left on device"):
        baton.export(nn.Linear(6, CLASSES), torch.randn(4, 6), folder / "net.pt2")
    assert not list(folder.iterdir())


class OneSample(nn.Module):
    """Treats a batch of one sample in another way than others."""

    def __init__(self, how):
        super().__init__()
        self.how, self.fc, self.norm = how, nn.Linear(4, CLASSES), nn.BatchNorm1d(CLASSES)

    def forward(self, x):
        scores = self.fc(x)
        if self.how == "squeezes":
            return self.norm(scores).squeeze()
        if self.how == "branches":
            return scores * 3 if x.shape[0] > 1 else scores
        if self.how == "fails":
            return scores.squeeze() @ torch.eye(CLASSES) + scores.squeeze().transpose(0, 1).sum(0)[:, None]
        return self.norm(scores) if self.how == "normalises" else scores.flatten(1)


@pytest.mark.usefixtures("accepting")
@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("squeezes", r"for a batch of one sample, output 0 has the shape \(5\) in place of \(1, 5\): squeeze\(\)"),
        ("branches", "for a batch of one sample, the exported program computes another output 0 than the model"),
        ("fails", "the exported program fails for a batch of one sample, .*write forward for any number"),
        ("normalises", None),
        ("is right", None),
    ],
)
def test_a_batch_of_one_sample_is_tried_too(tmp_path, how, problem):
    model, path = OneSample(how), tmp_path / "net.pt2"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if problem is None:
        export(model, path, torch.randn(2, 4))
    else:
        with pytest.raises(baton.ExportError, match=problem):
            export(model, path, torch.randn(2, 4))
    assert path.exists() == (problem is None)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())

"""What `baton.compare` finds. The worker is a double that computes with PyTorch."""

import baton
import pytest
import torch
import torchvision
from networks import CLASSES, SIDE, Function, Small, Two, WithLoss, images, with_root
from torch import nn

pytestmark = pytest.mark.usefixtures("fake_worker")
SAMPLES = 6  # 1/6 is rounded


def batch(samples=SAMPLES):
    return images(samples), torch.randint(0, CLASSES, (samples,))


def names(comparison):
    return sorted(row.name for row in comparison.rows)


def test_a_network_with_batch_norm_and_a_shared_weight_is_equal_bit_by_bit():
    found = baton.compare(Small(), batch(), label_smoothing=0.1)
    assert found.is_equal and found.worst.absolute == 0.0, str(found)
    gradients = [
        "conv.weight",
        "conv.bias",
        "norm.weight",
        "norm.bias",
        "first.weight",
        "fc.weight",
        "fc.bias",
        "unused",
    ]
    buffers = ["norm.running_mean", "norm.running_var"]
    assert names(found) == sorted(
        [
            "evaluated",
            "loss",
            "output",
            *(f"grad.{name}" for name in gradients),
            *(f"buffer.{name}" for name in buffers),
        ]
    )
    assert found.switched_off == ("drop",)


def test_neither_the_model_nor_settings_of_torch_change():
    model, data = Small().eval(), batch()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert baton.compare(model, data, threads=threads + 1, atol=1e-5).is_equal
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert model.drop.p == 0.5
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parts_have_no_gradients_and_keep_their_statistics():
    model = Small()
    model.conv.requires_grad_(False)
    model.norm.eval()
    found = baton.compare(model, batch())
    assert found.is_equal
    assert not any("conv" in row.name for row in found.rows)


def test_a_regression_has_the_mean_squared_error():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 3))
    found = baton.compare(model, (images(SAMPLES), torch.randn(SAMPLES, 3)), task="regression")
    assert found.is_equal


def test_several_inputs_are_given_by_name():
    inputs = {"left": torch.randn(SAMPLES, 4), "right": torch.randn(SAMPLES, 4)}
    target = torch.randint(0, CLASSES, (SAMPLES,))
    assert baton.compare(Two(), (inputs, target)).is_equal
    assert baton.compare(Two(), ((inputs["left"], inputs["right"]), target)).is_equal
    # In another order than forward's.
    assert baton.compare(Two(), (dict(reversed(inputs.items())), target)).is_equal


def with_loss_batch():
    return {"age": torch.rand(SAMPLES, 1), "image": images(SAMPLES)}, torch.randint(0, CLASSES, (SAMPLES,))


def test_a_loss_and_metrics_of_the_model_are_equal_bit_by_bit():
    model, (inputs, target) = WithLoss(), with_loss_batch()
    for given in (inputs, dict(reversed(inputs.items())), tuple(inputs.values())):
        found = baton.compare(model, (given, target), task="loss")
        assert found.is_equal and found.worst.absolute == 0.0, str(found)
    assert {"loss", "output", "grad.age.weight", "buffer.norm.running_var"} <= set(names(found))
    assert found.switched_off == ("drop",)


def test_a_loss_alone_needs_no_dict():
    def loss(x, target):
        return (x - target).abs().mean(1)

    found = baton.compare(Function(loss), (torch.randn(SAMPLES, 4), torch.randn(SAMPLES, CLASSES)), task="loss")
    assert found.is_equal, str(found)


def test_a_metric_has_no_gradient():
    found = baton.compare(Function(with_root), (torch.randn(SAMPLES, 4), torch.randn(SAMPLES)), task="loss")
    # NaN would be equal to NaN.
    assert found.is_equal, str(found)


def test_random_layers_of_all_kinds_are_switched_off():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
            self.rnn = nn.GRU(8, 8, num_layers=2, dropout=0.5, batch_first=True)
            self.depth = torchvision.ops.StochasticDepth(0.5, "row")
            self.drop = nn.Dropout1d(0.5)
            self.off = nn.Dropout(0.0)
            self.fc = nn.Linear(8, CLASSES)

        def forward(self, image):
            x = image.flatten(2).transpose(1, 2).reshape(image.shape[0], -1, 8)
            x = x + self.depth(self.attention(x, x, x, need_weights=False)[0])
            return self.fc(self.off(self.rnn(self.drop(x))[0].mean(1)))

    found = baton.compare(Attention(), batch())
    assert found.switched_off == ("attention", "rnn", "depth", "drop")
    assert found.is_equal, str(found)
    assert "without 4 random layers: attention, rnn, depth and 1 more" in str(found)


def test_random_numbers_that_stay_are_refused():
    class Noisy(Small):
        def forward(self, image):
            return super().forward(image + torch.randn_like(image))

    with pytest.raises(ValueError, match="draws random numbers that cannot be switched off"):
        baton.compare(Noisy(), batch())


def test_a_model_that_changes_itself_is_refused_with_the_buffer():
    model = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(3 * SIDE * SIDE, CLASSES)))
    with pytest.raises(ValueError, match=r"changes 1\.parametrizations\.weight\.0\._u that the next one uses"):
        baton.compare(model, batch())


def test_a_model_may_change_its_inputs_in_place_and_the_batch_stays_as_it_is():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3 * SIDE * SIDE, CLASSES)

        def forward(self, x):
            x -= 0.5
            return self.fc(x.flatten(1))

    data = batch()
    kept = data[0].clone()
    found = baton.compare(Centred(), data)
    assert found.is_equal, str(found)
    assert torch.equal(data[0], kept)


def test_a_loss_of_nan_proves_nothing_and_is_refused():
    inputs, target = batch()
    with pytest.raises(ValueError, match="the loss of this batch is nan"):
        baton.compare(Small(), (inputs * float("nan"), target))


def test_a_wrong_gradient_is_found_and_shown_first(monkeypatch):
    monkeypatch.setenv("FAKE", "noise")
    found = baton.compare(Small(), batch())
    assert not found.is_equal
    assert found.worst.name.startswith("grad.")
    assert found.worst.absolute == pytest.approx(1e-3, rel=1e-3)
    assert str(found).splitlines()[0].startswith("DIFFERENT: ")
    assert baton.compare(Small(), batch(), atol=2e-3).is_equal


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuse", "ended with exit code 2: model.program: program net.pt2 is not to my taste: change it"),
        ("silent", "probe wrote no results: use the programs of this package's version"),
        ("lacks", "Baton computed no grad."),
    ],
)
def test_a_worker_that_fails_is_an_error_with_its_line(monkeypatch, fault, message):
    monkeypatch.setenv("FAKE", fault)
    with pytest.raises(RuntimeError) as caught:
        baton.compare(Small(), batch())
    assert message in str(caught.value)


def test_without_a_worker_the_error_says_where_it_is_searched(no_programs):
    with pytest.raises(FileNotFoundError, match="no program baton-worker was found: set BATON_BIN"):
        baton.compare(Small(), batch())
    with pytest.raises(FileNotFoundError, match="worker is nowhere/worker, which is no program"):
        baton.compare(Small(), batch(), worker="nowhere/worker")


@pytest.mark.parametrize(
    ("inputs", "target", "message"),
    [
        (torch.zeros(4, 4), torch.zeros(4, dtype=torch.float64), "the target is float64 of shape (4,)"),
        (torch.zeros(4, 4), torch.zeros(3), "inputs with different numbers of samples (x has 4, target has 3)"),
        ((torch.zeros(4, 4),) * 2, torch.zeros(4), "batch has 2 inputs, but Function.forward takes 1 and the target"),
        ({}, torch.zeros(4), "batch does not fit Function.forward: missing a required argument: 'x'"),
    ],
)
def test_a_batch_that_a_loss_cannot_take_is_refused(inputs, target, message):
    with pytest.raises(ValueError) as caught:
        baton.compare(Function(with_root), (inputs, target), task="loss")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (images(), {}, "batch is not a pair: give (inputs, target)"),
        ((images(), [1, 2, 3, 4]), {}, "the target is of type list: give a tensor"),
        ((images(), torch.zeros(4)), {}, "needs int64 of shape (4,), the class of each sample"),
        ((images(), torch.zeros(3, dtype=torch.int64)), {}, "the target is int64 of shape (3,)"),
        ((images(), torch.full((4,), 5)), {}, "the target has classes 5..5, but the model has 5 outputs"),
        ((images(), torch.zeros(4)), {"task": "regression"}, "needs float32 of shape (4, outputs)"),
        ((images(), torch.zeros(4, 2)), {"task": "regression"}, "has 2 values per sample, but the model returns 5"),
        (batch(), {"task": "regression", "label_smoothing": 0.1}, "label_smoothing is for classification"),
        (batch(), {"threads": 0}, "threads is 0: it must be at least 1"),
        (batch(), {"atol": float("nan")}, "atol is nan: it must be at least 0"),
        (batch(), {"atol": -1}, "atol is -1: it must be at least 0"),
        (batch(1), {}, "batch has 1 sample"),
        (batch(), {"task": "loss"}, "batch does not fit Small.forward: got an unexpected keyword argument 'target'"),
        ((images(), [1, 2, 3, 4]), {"task": "loss"}, "batch contains a value of type list: all inputs must be tensors"),
        (batch(), {"task": "loss", "label_smoothing": 0.1}, "label_smoothing is for classification"),
        (batch(), {"label_smoothing": float("nan")}, "label_smoothing is nan: it must be in"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(data, options, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        baton.compare(Small(), data, **options)
    assert message in str(caught.value)


def test_a_branch_on_training_shows_in_the_evaluation():
    class Branch(Small):
        def forward(self, x):
            return super().forward(x) if self.training else 3 * super().forward(x)

    found = baton.compare(Branch(), batch())
    assert [row.name for row in found.rows if row.absolute] == ["evaluated"], str(found)

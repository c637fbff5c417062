"""The package with Baton's own programs, as users have it; `make parity ARGS=python` runs these tests."""

import os
import pathlib
import subprocess

import baton
import pytest
import torch
import torchvision
from baton import _programs
from networks import CLASSES, Function, Small, Two, WithLoss, images, with_root
from safetensors.torch import load_file, save_file
from torch import nn

pytestmark = pytest.mark.usefixtures("real_programs")
VISION = torchvision.models
SIDE = 64


def batch(samples=6):
    return torch.randn(samples, 3, SIDE, SIDE), torch.randint(0, CLASSES, (samples,))


class Recurrent(nn.Module):
    """Rows of an image as a sequence."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3 * SIDE, 24, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.fc = nn.Linear(48, CLASSES)

    def forward(self, x):
        return self.fc(self.rnn(x.permute(0, 2, 1, 3).flatten(2))[0][:, -1])


@pytest.mark.parametrize(
    "build",
    [
        Small,
        Recurrent,
        lambda: VISION.resnet18(num_classes=CLASSES),
        lambda: VISION.efficientnet_b0(num_classes=CLASSES),
        lambda: VISION.vit_b_16(num_classes=CLASSES, image_size=SIDE, dropout=0.1, attention_dropout=0.1),
        lambda: VISION.swin_t(num_classes=CLASSES, dropout=0.1, attention_dropout=0.1),
    ],
    ids=["small", "recurrent", "resnet18", "efficientnet_b0", "vit_b_16", "swin_t"],
)
def test_baton_computes_the_same_bits_as_pytorch(build):
    found = baton.compare(build(), batch(), label_smoothing=0.1)
    assert found.is_equal and found.worst.absolute == 0.0, str(found)


class Tokens(nn.Module):
    """Integers and a mask as inputs."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50000, 8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, tokens, mask):
        return self.fc((self.embedding(tokens) * mask.unsqueeze(2)).sum(1))


@pytest.mark.parametrize("seed", range(4))
def test_evaluation_uses_the_operators_without_gradients_of_pytorch(seed):
    torch.manual_seed(seed)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, CLASSES)

        def forward(self, x):
            return self.fc(self.rnn(x)[1][0][-1])

    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    for model, x in [
        (Last(), torch.randn(8, 9, 4)),
        (nn.Sequential(encoder, nn.Flatten(), nn.Linear(24, CLASSES)), torch.randn(8, 3, 8)),
    ]:
        found = baton.compare(model, (x, torch.randint(0, CLASSES, (8,))))
        assert found.is_equal and found.worst.absolute == 0.0, str(found)


def test_a_table_with_a_sparse_gradient_is_refused(tmp_path):
    model = nn.Sequential(nn.EmbeddingBag(50, 16, sparse=True), nn.Linear(16, CLASSES))
    with pytest.raises(baton.ExportError, match="makes a sparse gradient"):
        baton.export(model, torch.randint(0, 50, (4, 7)), tmp_path / "net.pt2")


def test_several_inputs_are_equal_in_any_form():
    target = torch.randint(0, CLASSES, (6,))
    inputs = {"left": torch.randn(6, 4), "right": torch.randn(6, 4)}
    for given in (inputs, dict(reversed(inputs.items())), tuple(inputs.values())):
        assert baton.compare(Two(), (given, target)).is_equal
    tokens = torch.randint(0, 50000, (6, 7))
    for mask in (torch.rand(6, 7), torch.rand(6, 7) > 0.5, torch.randint(0, 2, (6, 7))):
        assert baton.compare(Tokens(), ((tokens, mask), target)).is_equal


def test_a_loss_with_two_inputs_and_metrics_is_equal():
    inputs, target = {"age": torch.rand(6, 1), "image": images(6)}, torch.randint(0, CLASSES, (6,))
    found = baton.compare(WithLoss(), (inputs, target), task="loss")
    assert found.is_equal and found.worst.absolute == 0.0, str(found)
    assert found.switched_off == ("drop",)
    assert {"output", "grad.age.weight", "buffer.norm.running_var"} <= {row.name for row in found.rows}


def test_a_loss_alone_of_several_target_values_is_equal():
    model = Function(lambda x, target: (x - target.flatten(1)).abs().mean(1))
    assert baton.compare(model, (torch.randn(6, 4), torch.randn(6, 1, CLASSES)), task="loss").is_equal


def test_a_metric_has_no_gradient():
    assert baton.compare(Function(with_root), (torch.randn(6, 4), torch.randn(6)), task="loss").is_equal


def test_weights_in_channels_last_order_are_compared_in_that_order():
    model = VISION.resnet18(num_classes=CLASSES).to(memory_format=torch.channels_last)
    assert baton.compare(model, batch(), atol=1e-4).is_equal


def test_images_may_have_any_shape():
    assert baton.compare(Small(), (torch.randn(6, 3, 8, 12), batch()[1])).is_equal


def test_a_regression_is_equal_too():
    model = VISION.resnet18(num_classes=3)
    assert baton.compare(model, (batch()[0], torch.randn(6, 3)), task="regression").is_equal


def test_frozen_parts_are_equal_too():
    model = VISION.resnet18(num_classes=CLASSES)
    for module in (model.conv1, model.bn1, model.layer1):
        module.requires_grad_(False)
        module.eval()
    found = baton.compare(model, batch())
    assert found.is_equal
    assert not any(row.name.startswith("grad.layer1.") for row in found.rows)


def test_an_export_is_accepted(tmp_path):
    summary = baton.export(Small(), images(), tmp_path / "net.pt2", classes=CLASSES, mean=[77.9] * 3, std=[95.9] * 3)
    assert summary.checked_by.name == "baton"


RECIPE = """
name = "net"
train.epochs = 1
train.global_batch = 8
train.virtual_ranks = 1
optimizer = { kind = "sgd" }
schedule = { kind = "constant", lr = 0.1 }
data.train = "none"
data.val = "none"
"""


def test_a_recipe_with_the_lines_of_the_summary_is_accepted(tmp_path):
    example = {"age": torch.rand(4, 1), "image": images(), "target": torch.randint(0, CLASSES, (4,))}
    summary = baton.export(WithLoss(), example, tmp_path / "net.pt2", task="loss")
    recipe = tmp_path / "net.toml"
    recipe.write_text("\n".join([RECIPE, *summary.recipe]))
    check = [summary.checked_by, "recipe", "check", recipe, "--samples", "64"]
    done = _programs.run(check)
    assert done.returncode == 0, done.stderr
    # Not without one of them.
    for line in summary.recipe:
        recipe.write_text("\n".join([RECIPE, *(other for other in summary.recipe if other != line)]))
        assert _programs.run(check).returncode == 2


class Nms(nn.Module):
    """Uses an operator of torchvision's own."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, boxes):
        return self.fc(boxes) + torchvision.ops.nms(boxes, boxes[:, 0], 0.5).sum()


class Item(nn.Module):
    """Reads a number from a tensor, which torch.export allows."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.fc(x) * x.max().item()


@pytest.mark.parametrize(
    ("model", "message"),
    [(Nms(), "torchvision::nms is a custom one"), (Item(), "a number is read from a tensor (.item()")],
)
def test_what_only_baton_refuses_is_refused_with_its_line(tmp_path, model, message):
    with pytest.raises(baton.ExportError) as caught:
        baton.export(model, torch.rand(3, 4), tmp_path / "net.pt2")
    assert message in str(caught.value)
    assert "(test_real_programs.py, line " in str(caught.value)
    assert not (tmp_path / "net.pt2").exists()


def test_an_exported_resnet_computes_what_the_native_one_does(tmp_path):
    model = VISION.resnet50(num_classes=CLASSES).train()
    images, target = batch()
    weights = {name: value for name, value in model.state_dict().items() if "num_batches" not in name}
    save_file(weights, tmp_path / "weights.safetensors")
    save_file({"input": images, "target": target}, tmp_path / "batch.safetensors")
    baton.export(model, images, tmp_path / "net.pt2")
    program = f'arch = "program", program = "{tmp_path}/net.pt2"'
    native = f'arch = "resnet50", pretrained = "{tmp_path}/weights.safetensors"'
    worker = pathlib.Path(os.environ["BATON_BIN"], "baton-worker")
    results = []
    for name, network in (("program", program), ("native", native)):
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(f"""
            name = "test"
            model = {{ {network}, num_classes = {CLASSES}, channels_last = false }}
            data = {{ train = "none", val = "none" }}
            train = {{ epochs = 1, global_batch = 6, resolution = {SIDE}, virtual_ranks = 1 }}
            optimizer = {{ kind = "sgd" }}
            schedule = {{ kind = "constant", lr = 0.1 }}
            """)
        out = tmp_path / f"{name}.safetensors"
        subprocess.run(
            [worker, "probe", "--recipe", recipe, "--inputs", tmp_path / "batch.safetensors", "--out", out], check=True
        )
        results.append(load_file(out))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert (value - results[1][name]).abs().max() <= 1e-6, name


def test_the_weights_of_a_checkpoint_load_into_a_module():
    run = baton.Run(pathlib.Path(__file__).resolve().parents[3] / "tests/compat/7d60ec3/run")
    newest, older = (nn.ModuleDict({"fc": nn.Linear(3 * 32 * 32, 10)}) for _ in range(2))
    newest.load_state_dict(run.load_state_dict())
    older.load_state_dict(run.load_state_dict(run.checkpoints()[1]["name"]))
    assert not torch.equal(newest["fc"].weight, older["fc"].weight)
    with pytest.raises(ValueError, match="8 is no name of a checkpoint"):
        run.load_state_dict(8)
    with pytest.raises(baton.JobError, match="no-such"):
        run.load_state_dict("no-such")
    with pytest.raises(baton.JobError, match="has no averaged weights"):
        run.load_state_dict(ema=True)

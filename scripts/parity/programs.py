"""Networks that torch.export wrote, run by Baton and by eager PyTorch: outputs in evaluation and training mode, the
loss, every parameter's gradient, BatchNorm's statistics after one step.

The same operators run on the same memory layout, so every result must be equal, bit by bit. Only running statistics
differ in the last bit: Baton averages those of all micro-batches first, and then mixes them into the running ones by
`lerp`. The logits of training mode are not compared, as Baton's are those of a pass without gradients, for which PyTorch
may fold linear layers differently; the loss stands for them. Dropout and stochastic depth are off here: their masks come
from Baton's own seeds, and tests of crates/trainer compare them between ranks.
"""

import copy

import timm
import torch
import torchvision
from cases import errors, load, normalised, save, worst, write_recipe
from models import SAMPLES, pass_of, smoothed
from torch import nn

CLASSES = 10
TOLERANCE, RUNNING_TOLERANCE = 0.0, 1e-7


class Unet(nn.Module):
    """Skips between the way down and the way up, as in Ronneberger et al. 2015."""

    def __init__(self):
        super().__init__()
        self.first, self.down = block(3, 16), block(16, 32)
        self.bottom = block(32, 64)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.last = block(64, 32)
        self.fc = nn.Linear(48, CLASSES)

    def forward(self, x):
        first = self.first(x)
        down = self.down(nn.functional.max_pool2d(first, 2))
        up = self.up(self.bottom(nn.functional.avg_pool2d(down, 2)))
        up = nn.functional.interpolate(self.last(torch.cat([up, down], 1)), scale_factor=2, mode="bilinear")
        return self.fc(torch.cat([up, first], 1).mean((2, 3)))


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.SiLU())


class Recurrent(nn.Module):
    """Rows of an image as a sequence."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(3 * 64, 48, num_layers=2, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(96)
        self.fc = nn.Linear(96, CLASSES)

    def forward(self, x):
        rows, _ = self.rnn(x.permute(0, 2, 1, 3).flatten(2))
        return self.fc(self.norm(rows[:, -1]))


class Tied(nn.Module):
    """A shared weight, a constant buffer, a part without gradient, and sizes that are computed."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(48, 32, bias=False)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.register_buffer("order", torch.randperm(256))
        self.register_buffer("scale", torch.rand(32), persistent=False)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.fc = nn.Linear(32, CLASSES)

    def forward(self, x):
        patches = nn.functional.unfold(x, 4, stride=4).transpose(1, 2)[:, self.order]
        x = self.second(torch.tanh(self.first(self.embed(patches)))) * self.scale
        with torch.no_grad():
            shift = x.mean(1, keepdim=True)
        x = (x - shift).reshape(x.shape[0], x.shape[1] // 2, 2, -1).sum(2)
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.fc(x.amax(1))


VISION = torchvision.models
NETWORKS = {
    "resnet18": lambda: VISION.resnet18(num_classes=CLASSES),
    "resnet50": lambda: VISION.resnet50(num_classes=CLASSES),
    "convnext_tiny": lambda: VISION.convnext_tiny(num_classes=CLASSES),
    "efficientnet_b0": lambda: VISION.efficientnet_b0(num_classes=CLASSES),
    "mobilenet_v3_small": lambda: VISION.mobilenet_v3_small(num_classes=CLASSES),
    "densenet121": lambda: VISION.densenet121(num_classes=CLASSES),
    "regnet_y_400mf": lambda: VISION.regnet_y_400mf(num_classes=CLASSES),
    "swin_t": lambda: VISION.swin_t(num_classes=CLASSES),
    "vit_b_16": lambda: VISION.vit_b_16(num_classes=CLASSES, image_size=64),
    "shufflenet_v2": lambda: VISION.shufflenet_v2_x0_5(num_classes=CLASSES),
    "groupnorm": lambda: VISION.resnet18(num_classes=CLASSES, norm_layer=lambda channels: nn.GroupNorm(8, channels)),
    "timm coatnet": lambda: timm.create_model("coatnet_nano_rw_224", num_classes=CLASSES, img_size=64),
    "timm mixer": lambda: timm.create_model("mixer_s32_224", num_classes=CLASSES, img_size=64),
    "timm convnextv2": lambda: timm.create_model("convnextv2_atto", num_classes=CLASSES),
    "timm deit": lambda: timm.create_model("deit_tiny_patch16_224", num_classes=CLASSES, img_size=64),
    "unet": Unet,
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "tied": Tied,
}
SIDE = 64


def without_random(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout) or "StochasticDepth" in type(module).__name__:
            module.p = 0.0
        if type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    return model


def export(model, example, path):
    batch = torch.export.Dim("batch", min=2, max=4096)
    with torch.random.fork_rng():
        program = torch.export.export(copy.deepcopy(model).train(), (example,), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)


def reference(folder):
    for name, build in NETWORKS.items():
        case = folder / name.replace(" ", "_")
        case.mkdir(parents=True)
        model = without_random(build())
        export(model, torch.randn(3, 3, SIDE, SIDE), case / "net.pt2")
        batch = {
            "inputs": torch.randint(0, 256, (1, SAMPLES, SIDE, SIDE, 3), dtype=torch.uint8),
            "labels": torch.randint(0, CLASSES, (1, SAMPLES)),
        }
        save(batch, case / "batches.safetensors")
        recipe = {
            "arch": "program",
            "program": str(case / "net.pt2"),
            "num_classes": CLASSES,
            "channels_last": False,
        }
        write_recipe(case / "fp32.toml", model=recipe, loss={"label_smoothing": 0.1})
        images = normalised(batch["inputs"][0], torch.contiguous_format)
        weights = copy.deepcopy(model.state_dict())
        results = pass_of(model, weights, images, smoothed(batch["labels"][0]))
        results = {key: value for key, value in results.items() if value is not None and is_compared(key)}
        save(results, case / "torch-fp32.safetensors")


def is_compared(key):
    return key != "logits.training" and (not key.startswith("running/") or "running_" in key)


def compare(folder, table):
    for name in NETWORKS:
        case = folder / name.replace(" ", "_")
        found, expected = (load(case / f"{side}-fp32.safetensors") for side in ["baton", "torch"])
        found.pop("logits.training")
        for kind, tensors in errors(found, expected).items():
            most = RUNNING_TOLERANCE if kind == "running" else TOLERANCE
            table.row(name, kind, worst(tensors)[0], most, worst(tensors)[1])

"""Forward and backward pass of every network: logits in evaluation and training mode, the loss, every
parameter's gradient, the running statistics after one step.

Images in both memory formats, with label smoothing; signals with both losses of a regression.

In channels-last format on a CPU Baton computes 1×1 convolutions as matrix products. So there are two references in that
format: torchvision with the same products, which must agree as closely as the other format; and unchanged torchvision,
`own`, whose gradients differ for the reason given in parity.py: the difference may not exceed that between torch's own
two formats.
"""

import torch
from cases import error, errors, load, normalised, save, worst, write_recipe
from networks import CLASSES, FORMATS, NETWORKS, ResNet1d, without_special_values
from torch import nn

TOLERANCE = 1e-5
OWN_TOLERANCE = 1e-4
SAMPLES = 8
LABEL_SMOOTHING = 0.1
SIGNAL, CHANNELS, LENGTH, OUTPUTS = "resnet34_1d", 2, 100, 3
HUBER_DELTA = 0.5
REGRESSIONS = {"mse": nn.MSELoss(), "huber": nn.HuberLoss(delta=HUBER_DELTA)}


def pass_of(model, weights, inputs, loss):
    """All values that Baton computes too, with the same names."""
    model.load_state_dict(weights)
    out = {}
    model.eval()
    with torch.no_grad():
        out["logits.evaluation"] = model(inputs)
    model.train()
    logits = model(inputs)
    value = loss(logits)
    value.backward()
    out["logits.training"], out["loss"] = logits.detach(), value.detach()
    for key, parameter in model.named_parameters():
        out[f"gradient/{key}"] = parameter.grad
    for key, buffer in model.named_buffers():
        if buffer.is_floating_point():
            out[f"running/{key}"] = buffer
    return out


def smoothed(labels):
    return lambda logits: nn.functional.cross_entropy(logits, labels, label_smoothing=LABEL_SMOOTHING)


def image_batch(network):
    side = network.side
    return {
        "inputs": torch.randint(0, 256, (1, SAMPLES, side, side, 3), dtype=torch.uint8),
        "labels": torch.randint(0, CLASSES, (1, SAMPLES)),
    }


def reference(folder):
    for name, network in NETWORKS.items():
        case = folder / name
        weights, batch = without_special_values(network.build("nchw")), image_batch(network)
        save(weights, case / "weights.safetensors")
        save(batch, case / "batches.safetensors")
        loss = smoothed(batch["labels"][0])
        for label, memory_format in FORMATS.items():
            loss_section = {"label_smoothing": LABEL_SMOOTHING}
            write_recipe(case / f"{label}.toml", model=network.recipe(label), loss=loss_section)
            images = normalised(batch["inputs"][0], memory_format)
            results = pass_of(network.build(label), weights, images, loss)
            save(results, case / f"torch-{label}.safetensors")
            if label == "nhwc":
                own = pass_of(network.build(label, "torchvision"), weights, images, loss)
                save(own, case / "torch-own.safetensors")
    reference_signals(folder / SIGNAL)


def reference_signals(case):
    weights = without_special_values(ResNet1d(CHANNELS, OUTPUTS))
    inputs, targets = torch.randn(SAMPLES, CHANNELS, LENGTH), torch.randn(SAMPLES, OUTPUTS)
    save(weights, case / "weights.safetensors")
    save({"inputs": inputs[None], "targets": targets[None]}, case / "batches.safetensors")
    for kind, loss in REGRESSIONS.items():
        write_recipe(
            case / f"{kind}.toml",
            model={"arch": SIGNAL, "num_classes": OUTPUTS},
            loss={"kind": kind, "huber_delta": HUBER_DELTA},
        )
        model = ResNet1d(CHANNELS, OUTPUTS)
        results = pass_of(model, weights, inputs, lambda outputs, loss=loss: loss(outputs, targets))
        save(results, case / f"torch-{kind}.safetensors")


def compare(folder, table):
    for name in NETWORKS:
        for label in FORMATS:
            compare_alike(folder / name, name, label, table)
        compare_own(folder / name, name, table)
    for kind in REGRESSIONS:
        compare_alike(folder / SIGNAL, SIGNAL, kind, table)


def compare_alike(case, name, label, table):
    found, expected = (load(case / f"{side}-{label}.safetensors") for side in ["baton", "torch"])
    for kind, tensors in errors(found, expected).items():
        table.row(f"{name} {label}", kind, worst(tensors)[0], TOLERANCE, worst(tensors)[1])


def compare_own(case, name, table):
    """Compares with the unchanged torchvision model."""
    baton, own = load(case / "baton-nhwc.safetensors"), load(case / "torch-own.safetensors")
    for kind in ["logits.evaluation", "logits.training", "loss"]:
        table.row(f"{name} own", kind, error(baton[kind], own[kind]), OWN_TOLERANCE)
    allowed = gradient_distance(load(case / "torch-nchw.safetensors"), own)
    note = "at most as far as torch's formats from each other"
    table.row(f"{name} own", "gradient", gradient_distance(baton, own), allowed, note)


def gradient_distance(found, expected):
    """Relative distance of the gradients of all parameters together."""
    gradients = [key for key in expected if key.startswith("gradient/")]
    return error(*(torch.cat([side[key].flatten() for key in gradients]) for side in (found, expected)))

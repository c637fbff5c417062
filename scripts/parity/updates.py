"""Two optimizer updates with the same gradient and different rates: every weight after them, and the
moving average of every weight.

References: torch.optim, torch.nn.utils.clip_grad_norm_, torch.optim.swa_utils; LARS and LAMB are implemented here.
"""

from unittest import mock

import torch
from cases import errors, load, normalised, save, worst, write_recipe
from models import LABEL_SMOOTHING, image_batch, smoothed
from networks import FORMATS, NETWORKS, without_special_values
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

TOLERANCE = 1e-6
# Each of Muon's five iterations multiplies small singular values by 3.4, and their rounding errors with them.
MUON_TOLERANCE = 3e-6
# The second update tests the moments, and whether the rate is applied before or after them.
RATES = [1.0, 0.5]
# Large decay, so that an error in it is visible in the updated weights.
WEIGHT_DECAY, MOMENTUM, TRUST, EPS, LAMB_EPS = 0.1, 0.9, 0.02, 1e-8, 1e-6
# Well below the norm of the gradient.
CLIP = 0.1
DECAY = 0.9


class Lars(torch.optim.Optimizer):
    """You et al. 2017 (arXiv 1708.03888), equations 5 and 6 in the form of torch's SGD: the velocity
    is without the global rate. The paper's is with it; at a constant rate both are the same."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, decay = parameter.grad, group["weight_decay"]
                local = 1.0
                if parameter.ndim > 1:
                    # torch's sum of a million squares in float32 has an error of 3e-5.
                    norm, gradient_norm = (x.double().norm().item() for x in (parameter, gradient))
                    local = TRUST * norm / (gradient_norm + decay * norm + EPS)
                state = self.state[parameter]
                velocity = state.get("velocity", torch.zeros_like(parameter))
                state["velocity"] = MOMENTUM * velocity + local * (gradient + decay * parameter)
                parameter -= group["lr"] * state["velocity"]


class Lamb(torch.optim.Optimizer):
    """You et al. 2020 (arXiv 1904.00962), algorithm 2, with the identity as scaling function."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                moments = [(0.9, parameter.grad), (0.999, parameter.grad**2)]
                unbiased = []
                for number, (beta, value) in enumerate(moments):
                    moment = state.get(number, torch.zeros_like(parameter))
                    state[number] = beta * moment + (1 - beta) * value
                    unbiased.append(state[number] / (1 - beta ** state["step"]))
                step = unbiased[0] / (unbiased[1].sqrt() + LAMB_EPS) + group["weight_decay"] * parameter
                rate = 1.0
                if parameter.ndim > 1:
                    norm, step_norm = (x.double().norm().item() for x in (parameter, step))
                    rate = norm / step_norm
                parameter -= group["lr"] * rate * step


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for convolutions as matrices with a row per output, torch.optim.AdamW for the rest and the last
    layer. torch's iteration is in bfloat16, Baton's on a CPU in float32; here it is in float64, as torch's in float32 has
    larger rounding errors (5e-6) than Baton's."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})
        (decayed, others) = self.param_groups
        *self.hidden, last = decayed["params"]
        self.matrices = [torch.nn.Parameter(as_matrix(p.data, p)) for p in self.hidden]
        self.muon = torch.optim.Muon(
            self.matrices, lr, weight_decay=decayed["weight_decay"], adjust_lr_fn="match_rms_adamw"
        )
        rest = [
            {"params": [last], "weight_decay": decayed["weight_decay"]},
            {"params": others["params"], "weight_decay": others["weight_decay"]},
        ]
        self.adamw = torch.optim.AdamW(rest, lr)

    @torch.no_grad()
    def step(self):
        for matrix, parameter in zip(self.matrices, self.hidden):
            matrix.grad = as_matrix(parameter.grad, parameter)
        for optimizer in [self.muon, self.adamw]:
            for group in optimizer.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double):
                optimizer.step()


def as_matrix(tensor, like):
    """A row per output; for a parameter itself a view."""
    if like.is_contiguous():
        return tensor.reshape(len(tensor), -1)
    return tensor.permute(0, 2, 3, 1).reshape(len(tensor), -1)


SGD = {"kind": "sgd", "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
ADAMW = {"kind": "adamw", "weight_decay": WEIGHT_DECAY}
LAMB = {"kind": "lamb", "weight_decay": WEIGHT_DECAY}
MUON = {"kind": "muon", "weight_decay": WEIGHT_DECAY}
LARS = {"kind": "lars", "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "trust_coefficient": TRUST}


def sgd(groups, lr):
    return torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM)


def nesterov(groups, lr):
    return torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM, nesterov=True)


# Rate, sections of the recipe, and torch's rule.
RULES = {
    "sgd": (0.1, {"optimizer": SGD}, sgd),
    "decay all": (0.1, {"optimizer": {**SGD, "decay_norm_and_bias": True}}, sgd),
    "nesterov": (0.1, {"optimizer": {**SGD, "nesterov": True}}, nesterov),
    "adamw": (0.01, {"optimizer": ADAMW}, torch.optim.AdamW),
    "lars": (1.0, {"optimizer": LARS}, Lars),
    "lamb": (0.01, {"optimizer": LAMB}, Lamb),
    "muon": (0.01, {"optimizer": MUON}, Muon),
    "clipped": (0.5, {"optimizer": SGD, "train": {"clip_grad_norm": CLIP}}, sgd),
    "averaged": (0.1, {"optimizer": SGD, "ema": {"decay": DECAY}}, sgd),
}
NETWORK = NETWORKS["resnet18"]


def groups_of(model, decay_all):
    """The two decay groups of a recipe."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {
            "params": [p for p in model.parameters() if p.ndim == 1],
            "weight_decay": WEIGHT_DECAY if decay_all else 0.0,
        },
    ]


def results(model, gradients, lr, sections, rule):
    """Updates a model twice."""
    decay_all = sections["optimizer"].get("decay_norm_and_bias", False)
    optimizer = rule(groups_of(model, decay_all), lr)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for factor in RATES:
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient.clone()
        if "train" in sections:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            assert norm > 2 * CLIP, norm
        for group in optimizer.param_groups:
            group["lr"] = factor * lr
        optimizer.step()
        average.update_parameters(model)
    out = {f"weights/{key}": parameter.detach() for key, parameter in model.named_parameters()}
    if "ema" in sections:
        for key, parameter in average.module.named_parameters():
            out[f"average/{key}"] = parameter.detach()
    return out


def reference(folder):
    case = folder / NETWORK.arch
    weights, batch = without_special_values(NETWORK.build("nchw")), image_batch(NETWORK)
    save(weights, case / "weights.safetensors")
    save(batch, case / "batches.safetensors")
    for label, memory_format in FORMATS.items():
        model = NETWORK.build(label)
        model.load_state_dict(weights)
        images = normalised(batch["inputs"][0], memory_format)
        smoothed(batch["labels"][0])(model(images)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        for kind, (lr, sections, rule) in RULES.items():
            model.load_state_dict(weights)
            found = results(model, gradients, lr, sections, rule)
            save(found, case / f"torch-{kind}-{label}.safetensors")
            write_recipe(
                case / f"{kind}-{label}.toml",
                **sections,
                model=NETWORK.recipe(label),
                loss={"label_smoothing": LABEL_SMOOTHING},
                schedule={"kind": "constant", "lr": lr},
            )


def compare(folder, table):
    for kind in RULES:
        for label in FORMATS:
            found, expected = (
                load(folder / NETWORK.arch / f"{side}-{kind}-{label}.safetensors") for side in ["baton", "torch"]
            )
            # Averages of running statistics: curves.py.
            found = {key: found[key] for key in found if "running_" not in key}
            tolerance = MUON_TOLERANCE if kind == "muon" else TOLERANCE
            for result, tensors in errors(found, expected).items():
                table.row(f"{kind} {label}", result, worst(tensors)[0], tolerance, worst(tensors)[1])

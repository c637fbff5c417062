"""The learning rate of every update of a run, compared with torch's schedulers and ffcv-imagenet's function.

Baton counts in epochs, torch in updates. Update s counts from 0; of w warm-up updates it gets
peak · (s + 1) / w. The error is relative to the highest rate.
"""

import numpy
import torch
from cases import load, save, write_recipe
from torch.optim import lr_scheduler

TOLERANCE = 1e-9
# A few samples that do not fill a batch are dropped.
SAMPLES, BATCH, EPOCHS = 301, 8, 16
PER_EPOCH = SAMPLES // BATCH
TOTAL = EPOCHS * PER_EPOCH


def rates(lr, make):
    """The rates that a scheduler sets for an optimizer with this rate."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, found = make(optimizer), []
    for _ in range(TOTAL):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def one_cycle(peak, pct_start, div, final_div):
    return rates(
        peak,
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer,
            peak,
            total_steps=TOTAL,
            pct_start=pct_start,
            anneal_strategy="cos",
            cycle_momentum=False,
            div_factor=div,
            final_div_factor=final_div,
        ),
    )


def warmed_up(lr, warmup, rest):
    """`rest(optimizer)` after `warmup` updates of a linear rise."""

    def make(optimizer):
        rise = lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
        return lr_scheduler.SequentialLR(optimizer, [rise, rest(optimizer)], [warmup])

    return rates(lr, make)


def cosine(updates, final):
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, updates, eta_min=final)


def steps(milestones):
    return lambda optimizer: lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)


def ffcv(lr, peak_epoch):
    """`get_cyclic_lr` and the training loop of ffcv-imagenet."""

    def at(epoch):
        return numpy.interp([epoch], [0, peak_epoch, EPOCHS], [1e-4 * lr, lr, 0])[0]

    return [
        rate
        for epoch in range(EPOCHS)
        for rate in numpy.interp(numpy.arange(PER_EPOCH), [0, PER_EPOCH], [at(epoch), at(epoch + 1)])
    ]


def cases():
    """Recipes' schedules with torch's rates."""
    warmup = 5 * PER_EPOCH
    return {
        "one_cycle": (
            {"kind": "one_cycle", "peak_lr": 2.0, "pct_start": 0.3},
            one_cycle(2.0, 0.3, 25.0, 1e4),
        ),
        # The peak is between two updates.
        "one_cycle_between": (
            {"kind": "one_cycle", "peak_lr": 0.5, "pct_start": 0.1234, "div_factor": 10.0, "final_div_factor": 50.0},
            one_cycle(0.5, 0.1234, 10.0, 50.0),
        ),
        "warmup_cosine": (
            {"kind": "warmup_cosine", "peak_lr": 1.7, "warmup_epochs": 5.0, "final_lr": 0.01},
            warmed_up(1.7, warmup, cosine(TOTAL - warmup, 0.01)),
        ),
        "cosine": (
            {"kind": "warmup_cosine", "peak_lr": 1e-3, "warmup_epochs": 0.0},
            rates(1e-3, cosine(TOTAL, 0.0)),
        ),
        "step": (
            {"kind": "step", "lr": 0.1, "milestones": [6.0, 12.0]},
            rates(0.1, steps([6 * PER_EPOCH, 12 * PER_EPOCH])),
        ),
        "step_warmup": (
            {"kind": "step", "lr": 0.1, "milestones": [6.0, 12.0], "warmup_epochs": 5.0},
            warmed_up(0.1, warmup, steps([1 * PER_EPOCH, 7 * PER_EPOCH])),
        ),
        "piecewise_linear": (
            {"kind": "piecewise_linear", "points": [[0.0, 1.7e-4], [2.0, 1.7], [16.0, 0.0]]},
            ffcv(1.7, 2),
        ),
        "constant": ({"kind": "constant", "lr": 0.3}, [0.3] * TOTAL),
    }


def reference(folder):
    train = {"epochs": EPOCHS, "global_batch": BATCH}
    for name, (schedule, expected) in cases().items():
        write_recipe(folder / "rates" / f"{name}.toml", train=train, schedule=schedule)
        rates = {"rates": torch.tensor(expected, dtype=torch.float64)}
        save(rates, folder / "rates" / f"torch-{name}.safetensors")


def compare(folder, table):
    for name in cases():
        found, expected = (
            load(folder / "rates" / f"{side}-{name}.safetensors")["rates"] for side in ["baton", "torch"]
        )
        table.row(name, "other number of rates", abs(len(found) - TOTAL), 0)
        if len(found) == TOTAL:
            difference = (found - expected).abs().max() / expected.max()
            table.row(name, f"{TOTAL} rates", difference.item(), TOLERANCE)

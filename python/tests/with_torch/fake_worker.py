"""A double of `baton-worker probe`: computes the step of a program with PyTorch.

FAKE changes what it does: `refuse` ends like a refusal, `silent` writes nothing, `noise` changes one gradient, `lacks`
leaves one out.
"""

import argparse
import json
import os
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from torch.utils import _pytree as pytree

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

BATCH_NORM = torch.ops.aten.batch_norm.default
# Positions of arguments.
MEAN, VARIANCE, TRAINING, MOMENTUM = 3, 4, 5, 6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["probe"])
    for name in ("--recipe", "--inputs", "--out"):
        parser.add_argument(name, required=True, type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    fault = os.environ.get("FAKE")
    if fault == "refuse":
        print("error: model.program: program net.pt2 is not to my taste: change it", file=sys.stderr)
        sys.exit(2)
    if fault == "silent":
        return
    torch.set_num_threads(arguments.threads)
    recipe = tomllib.loads(arguments.recipe.read_text())
    results = step(recipe, load_file(arguments.inputs))
    gradient = next(name for name in results if name.startswith("grad."))
    if fault == "noise":
        results[gradient] = results[gradient] + 1e-3
    if fault == "lacks":
        del results[gradient]
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, arguments.out)


def step(recipe, batch):
    extra = {"baton.json": ""}
    program = torch.export.load(recipe["model"]["program"], extra_files=extra)
    network = program.module()
    mixed = batch_statistics(network)
    network.zero_grad()
    target, samples, outputs = batch.pop("target"), recipe["train"]["global_batch"], recipe["model"]["num_classes"]
    loss, fields = recipe["loss"], recipe["data"]["extra_fields"]
    # As Baton: other fields and the target of a loss are float32, and get the type and shape that the program has.
    values = {name: batch.pop(f"input.{name}").float() for name in fields}
    if loss["kind"] == "program":
        values["target"] = target.float().reshape(samples, outputs)
    (main,) = batch.values()
    flat = []
    for described in json.loads(extra["baton.json"])["inputs"]:
        shape = [samples, *described["shape"][1:]]
        flat.append(values.pop(described["name"], main).reshape(shape).to(getattr(torch, described["dtype"])))
    assert not values
    args, kwargs = pytree.tree_unflatten(flat, program.call_spec.in_spec)
    # A network may change its inputs in place.
    copies = pytree.tree_map(torch.clone, (args, kwargs))
    unchanged = torch.export.load(recipe["model"]["program"]).module()
    evaluated = outputs_of(in_evaluation_mode(unchanged), *copies, loss)
    output = outputs_of(network, args, kwargs, loss)
    if loss["kind"] == "program":
        assert output.shape == (samples, 1 + len(loss["metrics"]))
        total = output[:, 0].sum()
    else:
        assert output.shape == (samples, outputs)
    if loss["kind"] == "mse":
        total = functional.mse_loss(output, target, reduction="sum") / output.shape[1]
    if loss["kind"] == "cross_entropy":
        smoothing = loss["label_smoothing"]
        total = functional.cross_entropy(output, target, reduction="sum", label_smoothing=smoothing)
    mean = total * (torch.tensor(1.0) / len(target)).item()
    mean.backward()
    results = {"loss": mean.detach(), "output": output.detach(), "evaluated": evaluated.detach()}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            results[f"grad.{name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for name, buffer in network.named_buffers():
        if "running_" in name:
            results[f"buffer.{name}"] = buffer
    for name, (before, momentum) in mixed.items():
        results[f"buffer.{name}"] = before.lerp(results[f"buffer.{name}"], momentum)
    return results


def outputs_of(network, args, kwargs, loss):
    output = network(*args, **kwargs)
    if loss["kind"] != "program":
        return output
    if isinstance(output, dict):
        metrics = [output[name].detach().float() for name in loss["metrics"]]
        return torch.stack([output["loss"], *metrics], 1)
    return output.unsqueeze(1)


def in_evaluation_mode(network):
    for node in network.graph.nodes:
        if node.target is BATCH_NORM:
            node.args = (*node.args[:TRAINING], False, *node.args[TRAINING + 1 :])
    network.recompile()
    return network


def batch_statistics(network):
    """Makes every BatchNorm leave the batch's statistics in its buffers. Returns their old values and momenta."""
    found = {}
    for node in network.graph.nodes:
        if node.target is not BATCH_NORM or not node.args[TRAINING]:
            continue
        for buffer in (node.args[MEAN], node.args[VARIANCE]):
            tensor = network.get_buffer(buffer.target)
            found[buffer.target] = (tensor.clone(), node.args[MOMENTUM])
            tensor.zero_()
        node.args = (*node.args[:MOMENTUM], 1.0, *node.args[MOMENTUM + 1 :])
    network.recompile()
    return found


if __name__ == "__main__":
    main()

"""What `baton model inspect` and `baton plan` say of programs that torch.export wrote: floating-point operations, and the
activations that the backward pass needs.

Operations are compared with torch's own counter (torch.utils.flop_counter) and with the figures that torchvision
publishes; activations with what autograd really saves, measured by `saved_tensors_hooks`: the bytes of all storages
without those of parameters and buffers, for two numbers of samples, so that the part of a sample and the rest are known
apart. The plan of an exported ResNet-50 is compared with that of Baton's own.

The activations under autocast are those of a GPU that is not there: torch's fake tensors have shapes and storages
without values, and pass autocast and autograd as real ones do. Only fused attention finds no kernel without a GPU.

Dropout and stochastic depth are off: on a CPU torch keeps four bytes per value for a dropout, on a GPU one. The numbers
of recurrent layers are not compared: torch's counter does not know them, and Baton estimates what cuDNN keeps, which is
less than what torch saves on a CPU.
"""

import json
import os
import subprocess

import torch
import torchvision
from cases import write_recipe
from programs import NETWORKS, SIDE, export, without_random
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# What torchvision publishes in 10⁹ multiply-add operations, `_ops` of its weights.
PUBLISHED = ["resnet18", "resnet50", "efficientnet_b0", "mobilenet_v3_large", "convnext_tiny", "swin_t", "vit_b_16"]
PUBLISHED_SIDE, CLASSES = 224, 1000
NATIVE = "resnet50"
SAMPLES = [2, 4]
RECURRENT = ["gru", "lstm"]
# Fused attention, and a tensor that is made on the CPU.
NOT_WITHOUT_GPU = [*RECURRENT, "vit_b_16", "vit_b_16 224", "timm deit", "timm coatnet", "tied"]
# Published figures have three decimals.
PUBLISHED_TOLERANCE, FLOPS_TOLERANCE, KEPT_TOLERANCE = 0.005, 0.001, 0.01
PLAN_TOLERANCE = 0.01


def frozen(model, part):
    """Trained before and behind a frozen part, through which gradients pass."""
    model.get_submodule(part).requires_grad_(False)
    return model


PARTLY_FROZEN = {
    "resnet18 frozen": lambda: frozen(NETWORKS["resnet18"](), "layer2"),
    "mixer frozen": lambda: frozen(NETWORKS["timm mixer"](), "blocks.3"),
}


def kept_bytes(model, inputs):
    """Bytes of the storages that autograd saves in a forward pass."""
    # Fake tensors have no address of their values, but a storage each.
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            # The storage stays alive, so that its address is not used again.
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(inputs)
    kept = sum(storage.nbytes() for storage in storages.values())
    del outputs
    return kept


def kept_per_sample_and_pass(model, side, device):
    few, many = (kept_bytes(model, torch.randn(samples, 3, side, side, device=device)) for samples in SAMPLES)
    per_sample = (many - few) // (SAMPLES[1] - SAMPLES[0])
    return per_sample, few - SAMPLES[0] * per_sample


def autocast_kept(model, side):
    """What is kept under autocast on a GPU. The model has no values afterwards."""
    with FakeTensorMode():
        for module in model.modules():
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, tensor.requires_grad)
                setattr(module, name, fake)
        # `torch.autocast` refuses to start without a GPU.
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)
        try:
            return kept_per_sample_and_pass(model, side, "cuda")
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()


def measured(model, side):
    per_sample, per_pass = kept_per_sample_and_pass(model, side, "cpu")
    counter = FlopCounterMode(display=False)
    # It does not know the fused attention of a CPU.
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.randn(SAMPLES[0], 3, side, side))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "parameters": parameters,
        "flops": counter.get_total_flops() / SAMPLES[0],
        "kept": per_sample,
        "kept_per_pass": per_pass,
    }


def reference(folder):
    published = {f"{name} {PUBLISHED_SIDE}": torchvision.models.get_model_builder(name) for name in PUBLISHED}
    for name, build in {**NETWORKS, **PARTLY_FROZEN, **published}.items():
        case = folder / name.replace(" ", "_")
        case.mkdir(parents=True)
        model = without_random(build()).train()
        side = PUBLISHED_SIDE if name in published else SIDE
        export(model, torch.randn(3, 3, side, side), case / "net.pt2")
        expected = measured(model, side)
        if name in published:
            weights = torchvision.models.get_model_weights(name.split()[0])
            expected["published_flops"] = 2e9 * weights.DEFAULT.meta["_ops"]
            expected["published_parameters"] = weights.DEFAULT.meta["num_params"]
        if name not in NOT_WITHOUT_GPU:
            expected["half_kept"], expected["half_kept_per_pass"] = autocast_kept(model, side)
        (case / "torch.json").write_text(json.dumps(expected))


def baton(*arguments):
    program = f"{os.environ.get('CARGO_TARGET_DIR', 'target')}/debug/baton"
    found = subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True)
    return json.loads(found.stdout)


def relative(found, expected):
    return 0.0 if found == expected else abs(found - expected) / max(abs(expected), 1)


def compare(folder, table):
    for case in sorted(path for path in folder.iterdir() if (path / "torch.json").exists()):
        found = baton("model", "inspect", "--json", case / "net.pt2")
        expected = json.loads((case / "torch.json").read_text())
        name = case.name.replace("_", " ")
        table.row(name, "parameters", abs(found["parameter_values"] - expected["parameters"]), 0)
        if name not in RECURRENT:
            flops = relative(found["flops_per_sample"], expected["flops"])
            table.row(name, "FLOPs", flops, FLOPS_TOLERANCE, f"{expected['flops'] / 1e9:.3f} GFLOP")
            compare_kept(table, name, "activations", found, expected, "")
        if "half_kept" in expected:
            compare_kept(table, name, "bf16", found, expected, "half_")
        table.row(name, "not counted", len(found["not_counted"] or ""), 0, found["not_counted"] or "")
        if "published_flops" in expected:
            flops = relative(found["flops_per_sample"], expected["published_flops"])
            table.row(name, "published FLOPs", flops, PUBLISHED_TOLERANCE)
            table.row(name, "… parameters", abs(found["parameter_values"] - expected["published_parameters"]), 0)
    compare_plans(folder, table)


def compare_kept(table, name, label, found, expected, prefix):
    per_sample, per_pass = (found[f"{prefix}activation_bytes_per_{unit}"] for unit in ["sample", "pass"])
    real, real_per_pass = expected[f"{prefix}kept"], expected[f"{prefix}kept_per_pass"]
    note = f"{per_sample / 1e6:.2f} of {real / 1e6:.2f} MB"
    table.row(name, label, relative(per_sample, real), KEPT_TOLERANCE, note)
    # It may be 0, so that the error is a share of all.
    error = abs(per_pass - real_per_pass) / (real + real_per_pass)
    table.row(name, f"{label} per pass", error, KEPT_TOLERANCE, f"{per_pass / 1e6:.2f} of {real_per_pass / 1e6:.2f} MB")


def compare_plans(folder, table):
    """Baton's own network, and the same one exported."""
    program = folder / f"{NATIVE}_{PUBLISHED_SIDE}" / "net.pt2"
    models = {
        "native": {"arch": NATIVE, "num_classes": CLASSES},
        "exported": {"arch": "program", "program": str(program), "num_classes": CLASSES},
    }
    train = {"epochs": 1, "global_batch": 256, "resolution": PUBLISHED_SIDE, "virtual_ranks": 1}
    for compute in ["fp32", "bf16"]:
        plans = {}
        for name, model in models.items():
            recipe = folder / f"{name}.toml"
            write_recipe(recipe, model=model, train=train, precision={"compute": compute})
            plan = baton("plan", recipe, "--on", "a100-40", "--samples", 100_000, "--val-samples", 1_000, "--json")
            parts = {part["name"]: part["bytes"] for part in plan["plans"][0]["memory"]["parts"]}
            step = plan["plans"][0]["segments"][0]["step"]
            flops = sum(row["flop"] for row in step["pass"])
            plans[name] = parts["weights"], flops, parts["activations"], step["seconds"]
        (weights, flops, kept, seconds), native = plans["exported"], plans["native"]
        label = f"plan of {NATIVE} {compute}"
        table.row(label, "weights", abs(weights - native[0]), 0)
        table.row(label, "FLOPs", relative(flops, native[1]), PLAN_TOLERANCE)
        note = f"{kept / 1e9:.1f} and {native[2] / 1e9:.1f} GB"
        table.row(label, "activations", relative(kept, native[2]), PLAN_TOLERANCE, note)
        note = f"{seconds * 1e3:.0f} and {native[3] * 1e3:.0f} ms"
        table.row(label, "time of a step", relative(seconds, native[3]), PLAN_TOLERANCE, note)

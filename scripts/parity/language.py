"""Language models: small random models of every family with LoRA on all linear layers, against transformers and PEFT.

Texts of different lengths in one batch, the shorter ones padded for torch; prompts without labels; windows that are
shorter than the texts, with and without soft caps; odd sizes. Both sides compute loss, logits and the gradient of every
adapter matrix in float32.

transformers computes attention with libtorch's fused operation ("sdpa"), as Baton does, or, where scores are capped,
with its own ("eager").

The models whose weights are NF4 are computed with the values that bitsandbytes makes of Baton's bytes, and the bytes are
compared with those that bitsandbytes makes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import bitsandbytes.functional
import torch
import transformers
from cases import error, load, save, worst, write_recipe
from peft import LoraConfig, PeftModel, get_peft_model

LOSS, LOGITS, GRADIENT = 1e-6, 1e-6, 1e-6
SIZES = {
    "vocab_size": 311,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "attn_implementation": "sdpa",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 7}
EAGER = {"attn_implementation": "eager"}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
# Name: class, configuration, and what differs from the sizes above.
CASES = {
    "llama2": ("Llama", "LlamaConfig", {"rope_theta": 5e4, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", "LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama with biases": ("Llama", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "smollm": ("Llama", "LlamaConfig", {"num_key_value_heads": 3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", "MistralConfig", {"sliding_window": 5}),
    "qwen2": (
        "Qwen2",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", "Qwen3Config", {"head_dim": 10}),
    "gemma2": ("Gemma2", "Gemma2Config", GEMMA | EAGER),
    "gemma3": ("Gemma3", "Gemma3TextConfig", GEMMA | ALTERNATING),
}
# Their linear layers are quantised too.
QUANTISED = ["smollm", "qwen3", "gemma2"]
# bitsandbytes' library for CPUs rounds a few scales to the neighbour of the nearest value; its CUDA kernels do not.
OTHER_SCALES = 0.02
# The model of `make run-lora`, if it is there.
REAL = "SmolLM2-135M"
REAL_MODEL = Path(__file__).resolve().parents[2] / ".lora/models/smollm2"
LENGTHS = (24, 15, 9)
PROMPTS = (7, 3, 5)


def cases():
    return [*CASES, REAL] if REAL_MODEL.exists() else list(CASES)


def reference(folder):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in cases():
        torch.manual_seed(0)
        case = folder / name
        if name == REAL:
            model = transformers.AutoModelForCausalLM.from_pretrained(REAL_MODEL, dtype=torch.float32)
            (case / "model").parent.mkdir(parents=True)
            (case / "model").symlink_to(REAL_MODEL.resolve())
        else:
            kind, config, changes = CASES[name]
            config = getattr(transformers, config)(**SIZES | changes)
            model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() == 1 else 0.08)
            model.save_pretrained(case / "model")
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(case / "adapter")
        tokens = torch.randint(3, SIZES["vocab_size"], (len(LENGTHS), max(LENGTHS)))
        labels, mask = tokens.clone(), torch.ones_like(tokens)
        for row, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
            labels[row, :prompt], labels[row, length:] = -100, -100
            tokens[row, length:], mask[row, length:] = 0, 0
        save({"input": tokens, "target": labels, "mask": mask}, case / "torch_inputs.safetensors")
        save({"input": tokens, "target": labels}, case / "inputs.safetensors")
        save(computed(model, case), case / "torch.safetensors")
        write_recipe(
            case / "recipe.toml",
            model={
                "arch": "causal_lm",
                "num_classes": 0,
                "path": str(case / "model"),
                "pretrained": str(case / "adapter" / "adapter_model.safetensors"),
            },
            adapter={"rank": 4, "alpha": 8},
            data={"train": "none", "val": "none", "sequence": 64},
            loss={"kind": "next_token"},
            cluster={"device": "cpu"},
        )


def computed(model, case):
    """Loss, logits and the gradients of all that is trained."""
    inputs = load(case / "torch_inputs.safetensors")
    tokens, labels, mask = (inputs[name] for name in ["input", "target", "mask"])
    outputs = model.train()(input_ids=tokens, labels=labels, attention_mask=mask)
    outputs.loss.backward()
    results = {"loss": outputs.loss.detach(), "mask": mask.bool(), "logits": outputs.logits.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results["grad." + name.replace(".default", "")] = parameter.grad
    return results


def quantised(case, table, name):
    """The model with the values that bitsandbytes makes of Baton's bytes."""
    (cache,) = (case / "model").glob("baton-nf4-v1-*.safetensors")
    stored = load(cache)
    config = transformers.AutoConfig.from_pretrained(case / "model")
    attention = EAGER if CASES[name][2].get("attn_implementation") else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(case / "model", config=config, **attention).float()
    codes, scales, others, furthest, outer = 0, 0, 0, 0, 0.0
    for key, weight in model.named_parameters():
        if key not in stored:
            continue
        packed, state = bitsandbytes.functional.quantize_4bit(
            weight.data, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        packed, ours = packed.flatten(), stored[key]
        codes += (packed != ours).sum().item() + abs(len(packed) - len(ours))
        distance = (state.absmax.int() - stored[f"{key}.scales"].int()).abs()
        scales, others = scales + len(distance), others + (distance > 0).sum().item()
        furthest = max(furthest, distance.max().item())
        outer = max(outer, error(stored[f"{key}.outer_scales"], state.state2.absmax))
        state.absmax, state.offset = stored[f"{key}.scales"], stored[f"{key}.offset"][0]
        state.state2.absmax = stored[f"{key}.outer_scales"]
        # As one row: the library for CPUs decodes rows that are no multiple of 64 long with the scales of others.
        state.shape = torch.Size([1, weight.numel()])
        weight.data = bitsandbytes.functional.dequantize_4bit(ours.view(-1, 1), state).view_as(weight)
    table.row(f"{name} nf4", "bytes of codes that differ", codes, 0)
    table.row(f"{name} nf4", "share of scales that differ", others / scales, OTHER_SCALES, f"of {scales}")
    table.row(f"{name} nf4", "codes between them", furthest, 1)
    table.row(f"{name} nf4", "scales of scales", outer, 1e-6)
    return PeftModel.from_pretrained(model, case / "adapter", is_trainable=True)


def probe(case, changes=()):
    worker = os.path.join(os.environ["BATON_BIN"], "baton-worker")
    files = ["--recipe", "recipe.toml", "--inputs", "inputs.safetensors", "--out", "baton.safetensors"]
    files += [word for change in changes for word in ("--set", change)]
    done = subprocess.run([worker, "probe", "--json", *files], cwd=case, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"parity: {case.name}: {done.stderr}")
    return json.loads(done.stdout)


def compare(folder, table):
    for name in cases():
        case = folder / name
        probe(case)
        compare_case(table, name, load(case / "torch.safetensors"), load(case / "baton.safetensors"))
    for name in QUANTISED:
        case = folder / name
        probe(case, ["adapter.base=nf4"])
        expected = computed(quantised(case, table, name), case)
        compare_case(table, f"{name} nf4", expected, load(case / "baton.safetensors"))


def compare_case(table, name, expected, found):
    mask = expected["mask"]
    table.row(name, "loss", error(found["loss"], expected["loss"]), LOSS)
    logits = error(found["output"][mask], expected["logits"][mask])
    table.row(name, "logits", logits, LOGITS)
    gradients = {key for key in expected if key.startswith("grad.")}
    table.row(name, "adapters left out", len(gradients ^ {k for k in found if k.startswith("grad.")}), 0)
    largest, tensor = worst({key: error(found[key], expected[key]) for key in gradients})
    table.row(name, "gradient", largest, GRADIENT, tensor if largest > 0 else "")

"""Fine-tunes language models of made-up weights on a GPU: what trains, tokens per second, and PEFT's.

    language.py --programs FOLDER --work FOLDER [--device cuda] [--small]

Requires transformers, tokenizers and, for PEFT, peft. Prints one JSON object. Each variant is a job of `baton up`, with
an evaluation that writes texts at its end; a step's time is that between two checkpoints.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
# Checkpoints are made at the multiples of this step; the steps between the first and the last are measured.
EVERY, STEPS = 20, 60
SEQUENCE = 256
# Tokens of a packed sequence.
PACKED = 512
# Shapes of SmolLM2-135M, and of Gemma 2 with a tenth of the 2B model's layers and soft caps on the scores.
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "vocab_size": 49152,
}
SMALL = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size": 2048,
}
VARIANTS = {
    "lora": ("smollm2", ["adapter={ rank = 16, alpha = 32 }"]),
    "lora_again": ("smollm2", ["adapter={ rank = 16, alpha = 32 }"]),
    "lora_fast": ("smollm2", ["adapter={ rank = 16, alpha = 32 }", "precision.determinism=fast"]),
    "lora_packed": ("smollm2", ["adapter={ rank = 16, alpha = 32 }", "data.packing=true", f"data.sequence={PACKED}"]),
    "qlora": ("smollm2", ["adapter={ rank = 16, alpha = 32, base = 'nf4' }"]),
    "full": ("smollm2", []),
    "gemma2_lora": ("gemma2", ["adapter={ rank = 16, alpha = 32 }"]),
}
RECIPE = """
name = "gpu-language"
model = { arch = "causal_lm" }
train = { epochs = 1, clip_grad_norm = 1.0, virtual_ranks = 1 }
optimizer = { kind = "adamw" }
schedule = { kind = "constant", lr = 1e-4 }
loss = { kind = "next_token" }
evaluation = { batch = 8 }
checkpoint = { every_epochs = 0 }
"""


def write_tokenizer(folder, lines):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}<end>{% endif %}"
    )
    settings = {"eos_token": "<end>", "chat_template": template + "\n{% endfor %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_model(folder, config):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoConfig.for_model(**config, bos_token_id=0, eos_token_id=0, pad_token_id=None)
    AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).save_pretrained(folder)


def run(command, log, limit=120):
    output = log.with_suffix(".out")
    with log.open("w", encoding="utf-8") as errors, output.open("w", encoding="utf-8") as lines:
        process = subprocess.Popen(list(map(str, command)), stdout=lines, stderr=errors)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = f"none after {limit} s"
        finally:
            # A job saves and ends; its processes end with it.
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    printed = output.read_text(encoding="utf-8")
    if status != 0:
        tail = (log.read_text(encoding="utf-8") + printed)[-1500:]
        raise RuntimeError(f"status {status}: {tail}")
    return printed


def baton(options, model, name, settings, tokens, all_tokens):
    if name == "lora_packed":
        # About as many tokens as a step of padded texts.
        settings = [*settings, f"train.global_batch={round(tokens / PACKED)}"]
    run_dir = options.work / f"{name}-run"
    common = [f"model.path={options.work / model}", f"cluster.device={options.device}"]
    common += [f"data.train={options.work / 'train.beton'}", f"data.val={options.work / 'val.beton'}"]
    common += [f"data.sequence={SEQUENCE}", f"train.global_batch={options.batch}", "data.order=sequential"]
    common += [f"checkpoint.every_steps={EVERY}", "precision.compute=bf16"]
    common += ["evaluation.generate={ samples = 8, max_tokens = 32 }"]
    words = [word for setting in [*common, *settings] for word in ("--set", setting)]
    program = options.programs / "baton"
    command = [program, "up", options.work / "recipe.toml", "--ranks", 1, "--run-dir", run_dir, "--json"]
    output = run([*command, "--listen", "127.0.0.1:0", *words], options.work / f"{name}.log", options.limit)
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    saved = {event["step"]: event["unix_millis"] for event in events if event.get("kind") == "saved"}
    last = max(step for step in saved if step % EVERY == 0)
    seconds = (saved[last] - saved[EVERY]) / (last - EVERY) / 1e3
    said = [event["message"] for event in events if event.get("kind") in ("evaluated", "rank_failed")]
    if name == "lora_packed":
        # The job is one epoch.
        tokens = all_tokens / events[-1]["status"]["latest"]["total_steps"]
    return {"step_seconds": seconds, "tokens_per_second": tokens / seconds, "said": said}


def peft(options, tokens):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1]
    command += [ROOT / "scripts/bench-lora/torch_side.py", "--model", options.work / "smollm2"]
    command += ["--data", options.work / "train.beton", "--batch", options.batch, "--device", options.device]
    output = run(command, options.work / "peft.log", options.limit)
    at = {int(step): float(when) for when, step in re.findall(r"^(\S+) step (\d+) ", output, re.MULTILINE)}
    seconds = (at[STEPS] - at[EVERY]) / (STEPS - EVERY)
    return {"step_seconds": seconds, "tokens_per_second": tokens / seconds}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batch", type=int, default=32, help="texts per step")
    parser.add_argument("--small", action="store_true", help="tiny models, to test this script")
    parser.add_argument("--limit", type=int, default=45, help="seconds after which a variant is ended")
    parser.add_argument("--only", default=",".join([*VARIANTS, "peft"]))
    options = parser.parse_args()
    # A time limit of the caller ends the current job too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    options.programs, options.work = options.programs.absolute(), options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    work = options.work
    sys.path += [str(ROOT / "scripts" / folder) for folder in ("bench", "bench-lora")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[-2:])
    import texts

    functions = work / "functions.jsonl"
    run([sys.executable, ROOT / "recipes/language/python_functions.py", functions], work / "functions.log")
    lines = functions.read_text(encoding="utf-8").splitlines()
    for name, config in ("smollm2", SMOLLM2), ("gemma2", GEMMA2):
        (work / name).mkdir(exist_ok=True)
        write_model(work / name, config | (SMALL if options.small else {}))
        write_tokenizer(work / name, lines[:2000])
    tokenize = [options.programs / "baton", "data", "tokenize", "--from", functions, "--tokenizer", work / "smollm2"]
    tokenize += ["--sequence", SEQUENCE, "--to", work / "train.beton", "--val", work / "val.beton"]
    tokenize += ["--val-share", 0.125, "--by", "module"]
    run(tokenize, work / "tokenize.log")
    (work / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    train = work / "train.beton"
    lengths = [len(text) for text, _ in texts.read(train, texts.count(train))]
    tokens = sum(lengths[EVERY * options.batch : STEPS * options.batch]) / (STEPS - EVERY)

    found = {"tokens_per_step": tokens}
    for name in options.only.split(","):
        begin = time.monotonic()
        try:
            if name == "peft":
                found[name] = peft(options, tokens)
            else:
                model, settings = VARIANTS[name]
                found[name] = baton(options, model, name, settings, tokens, sum(lengths))
        except (RuntimeError, KeyError, ValueError) as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        if name == "lora_again":
            pair = [options.work / f"{each}-run/checkpoints" for each in ("lora", name)]
            diff = subprocess.run(
                [options.programs / "baton", "checkpoint", "diff", *pair], capture_output=True, text=True
            )
            found[name]["same_bits_as_lora"] = "are the same in all bits" in diff.stdout
        found[name]["seconds"] = round(time.monotonic() - begin, 1)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    print(json.dumps(found))
    if failed := [name for name in options.only.split(",") if "error" in found[name]]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Compares fine-tuning with LoRA with PEFT; see run.sh.

    race.py --baton PROGRAM --work DIR --rounds N [--device cuda]

Both sides train on the same texts in the same order, and every step's number of tokens is known, except with packing,
where it is the mean of all sequences. Packing is measured on functions of every length, most of which are short.
"""

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import common
import texts
from jobs import Baton, Torch, gaps, signal_rank

HERE = Path(__file__).parent
ROOT = HERE.absolute().parents[1]
LORA = ROOT / ".lora"
MODEL, TRAIN = LORA / "models/smollm2", LORA / "data/functions-train.beton"
# Most characters of the body of a function of the mixed texts, and most tokens of one.
LONGEST, SEQUENCE = 1500, 768
# Packed sequences per step, which have about as many tokens as a step of padded texts; and the steps that are counted.
PACKED, MIXED_COUNTED = 2, 12
# Texts per rank and step; rank of the adapter's matrices.
BATCH, RANK, LR, CLIP = 8, 16, 1e-4, 1.0
# Steps that are not counted, and those that are.
WARM, COUNTED = 2, 6
RECIPE = f"""
name = "bench-lora"
model = {{ arch = "causal_lm", path = "{MODEL}" }}
adapter = {{ rank = {RANK}, alpha = {2 * RANK} }}
data = {{ train = "{TRAIN}", val = "{TRAIN}", sequence = 256, order = "sequential" }}
train = {{ epochs = 100, clip_grad_norm = {CLIP} }}
optimizer = {{ kind = "adamw" }}
schedule = {{ kind = "constant", lr = {LR} }}
loss = {{ kind = "next_token" }}
evaluation = {{ every_epochs = 100 }}
checkpoint = {{ every_epochs = 0, every_steps = 0 }}
"""
SIDES = ["baton", "peft", "packed", "peft_padded", "qlora", "peft_qlora"]
AIMS = {
    "lora_step_ratio": (1.1, "at least"),
    "qlora_step_ratio": (1.1, "at least"),
    "memory_ratio": (0.8, "at most"),
    "qlora_memory_ratio": (0.8, "at most"),
    "packing_gain": (2.0, "at least"),
    "resume_skip_seconds": (1.0, "at most"),
    "rank_kill_seconds": (3.0, "at most"),
}


def gpu_mib(pid):
    """The memory of a GPU that a process holds. Allocators of both sides keep what they have had."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    rows = (line.split(",") for line in subprocess.check_output(query, text=True).splitlines())
    return sum(float(mib) for process, mib in rows if int(process) == pid)


def peak_mib(pid):
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measured(job, memory_of, counted=COUNTED):
    """Seconds of the counted steps, and the memory of the larger rank, MiB."""
    job.start()
    job.wait_for_number(WARM + counted)
    memory = max(map(memory_of, job.ranks()))
    job.kill()
    seconds = gaps([step for step in job.steps if step.number >= WARM])[:counted]
    return sum(seconds), memory


def alone(job, memory_of):
    """The same with one rank: padded long texts of two do not fit into the memory of a small machine."""
    job.world_size = 1
    return measured(job, memory_of, MIXED_COUNTED)


def killed(job):
    """Seconds from `kill -9` of a rank until the next finished step of the next generation."""
    job.start()
    job.wait_for_number(WARM + COUNTED)
    last = job.steps[-1].incarnation
    when = signal_rank(job, job.world_size - 1, 9)
    step = job.wait_for(lambda step: step.incarnation > last, "a step after the kill")
    job.kill()
    return step.when - when


def mixed_texts(baton, folder):
    """Writes functions of every length, in a fixed random order: a file of tokens."""
    source, target = folder / "mixed.jsonl", folder / "mixed.beton"
    functions = ROOT / "recipes/language/python_functions.py"
    subprocess.run([sys.executable, functions, source, "--longest", str(LONGEST)], check=True)
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    source.write_text("".join(lines), encoding="utf-8")
    limit = ["--sequence", str(SEQUENCE)]
    subprocess.run(
        [baton, "data", "tokenize", "--from", source, "--to", target, "--tokenizer", MODEL, *limit], check=True
    )
    return target


def skipped():
    """Seconds until the first batch in the middle of an epoch of a million packed texts, once the file is open."""
    command = ["cargo", "run", "--quiet", "-p", "baton-data", "--example", "resume_skip"]
    printed = subprocess.check_output(command, text=True, cwd=HERE)
    print(printed, end="")
    return float(printed.splitlines()[-1].split(": ")[1].split()[0])


def main():
    options = common.parser(__doc__)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = common.read_arguments(options)
    # Padded long texts take PEFT half a minute per step.
    common.TIMEOUT_SECONDS = 900
    on_gpu = arguments.device == "cuda"
    ranks, memory_of = (1, gpu_mib) if on_gpu else (2, peak_mib)
    common_settings = [f"cluster.device={arguments.device}", f"train.global_batch={ranks * BATCH}"]
    common_settings += [f"train.virtual_ranks={ranks}", *(["precision.compute=bf16"] if on_gpu else [])]
    with common.working_in(arguments.work):
        recipe = arguments.work / "recipe.toml"
        recipe.write_text(RECIPE, encoding="utf-8")
        each = ranks * BATCH
        mixed = mixed_texts(arguments.baton, arguments.work)
        packing = [f"data.train={mixed}", f"data.val={mixed}", "data.packing=true"]
        packing += [f"data.sequence={SEQUENCE}", f"train.global_batch={PACKED}", "train.virtual_ranks=1"]
        changes = [word for change in [*common_settings, *packing] for word in ("--set", change)]
        shown = subprocess.check_output([arguments.baton, "recipe", "check", recipe, "--json", *changes], text=True)
        sequences = json.loads(shown)["run"]["samples"]

        def counted(path, per_step=each, steps=COUNTED):
            read = texts.read(path, (WARM + steps) * per_step)[WARM * per_step :]
            return sum(len(text) for text, _ in read)

        every = texts.read(mixed, texts.count(mixed))
        packed = sum(len(text) for text, _ in every) / sequences * MIXED_COUNTED * PACKED
        tokens = {name: counted(TRAIN) for name in SIDES} | {
            "packed": packed,
            "peft_padded": counted(mixed, BATCH, MIXED_COUNTED),
        }
        found = {name: [] for name in [*SIDES, "kill"]}
        for number in range(1, arguments.rounds + 1):

            def baton(name, *settings, number=number):
                folder = arguments.work / f"{name}-{number}"
                job = Baton(folder, arguments.baton, recipe, ["train.epochs=100", *common_settings, *settings])
                job.world_size = ranks
                return job

            def peft(name, *flags, number=number):
                flags = ["--device", arguments.device, *flags]
                job = Torch(arguments.work / f"{name}-{number}", HERE / "torch_side.py", *flags)
                job.world_size = ranks
                return job

            common.say(f"round {number} of {arguments.rounds}")
            found["baton"].append(measured(baton("baton"), memory_of))
            found["peft"].append(measured(peft("peft"), memory_of))
            found["packed"].append(alone(baton("packed", *packing), memory_of))
            found["peft_padded"].append(alone(peft("peft_padded", "--data", mixed), memory_of))
            found["qlora"].append(measured(baton("qlora", "adapter.base=nf4"), memory_of))
            found["peft_qlora"].append(measured(peft("peft_qlora", "--nf4"), memory_of))
            found["kill"].append(killed(baton("kill", f"train.global_batch={ranks}")))
        report(found, tokens, skipped())


def report(found, tokens, skip_seconds):
    for name in SIDES:
        for number, (seconds, memory) in enumerate(found[name], 1):
            print(f"{name} {number}: {tokens[name] / seconds:.0f} useful tokens/s, {memory:.0f} MiB per rank")
    middle = {name: tuple(map(statistics.median, zip(*found[name], strict=True))) for name in SIDES}
    result = {
        "lora_step_ratio": middle["peft"][0] / middle["baton"][0],
        "qlora_step_ratio": middle["peft_qlora"][0] / middle["qlora"][0],
        "memory_ratio": middle["baton"][1] / middle["peft"][1],
        "qlora_memory_ratio": middle["qlora"][1] / middle["peft_qlora"][1],
        "packing_gain": tokens["packed"] / middle["packed"][0] / (tokens["peft_padded"] / middle["peft_padded"][0]),
        "resume_skip_seconds": skip_seconds,
        "rank_kill_seconds": statistics.median(found["kill"]),
    }
    for name, (aim, bound) in AIMS.items():
        is_met = result[name] >= aim if bound == "at least" else result[name] <= aim
        print(f"{name} {result[name]:.3g}, aim {bound} {aim}: {'met' if is_met else 'missed'}")
    print("RESULT " + json.dumps({name: float(f"{value:.3g}") for name, value in result.items()}))


if __name__ == "__main__":
    main()

"""PyTorch's side of the LoRA bench: transformers and PEFT with DDP over gloo, as their users write it.

    torchrun --nproc-per-node 2 torch_side.py --checkpoint FILE [--data FILE] [--nf4]

Trains until it is killed; FILE is not used. Rank 0 prints a line per finished step: seconds since 1970, the step, and
its process. Each batch is padded to its longest text. With --nf4 bitsandbytes quantises the model, and the layers are
recomputed for the gradient, as `prepare_model_for_kbit_training` does by default.
"""

import argparse
import os
import time
from pathlib import Path

import texts
import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from race import BATCH, CLIP, LR, MODEL, RANK, TRAIN

STEPS = 64


def batch(samples):
    """Token ids, labels and attention mask of padded texts."""
    length = max(len(tokens) for tokens, _ in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (tokens, wanted) in enumerate(samples):
        ids[row, : len(tokens)], labels[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(wanted)
        mask[row, : len(tokens)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--data", type=Path, default=TRAIN)
    parser.add_argument("--nf4", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    nf4 = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    kind = {"quantization_config": nf4, "device_map": "cpu"} if arguments.nf4 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, **kind)
    if arguments.nf4:
        model = prepare_model_for_kbit_training(model)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    rule = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    samples = texts.read(arguments.data, STEPS * BATCH * world)
    for step in range(STEPS):
        start = (step * world + rank) * BATCH
        parallel(**batch(samples[start : start + BATCH])).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        rule.step()
        rule.zero_grad()
        if rank == 0:
            print(f"{time.time():.6f} step {step + 1} of process {os.getpid()}", flush=True)


if __name__ == "__main__":
    main()

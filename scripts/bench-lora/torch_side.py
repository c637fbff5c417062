"""PyTorch's side of the LoRA bench: transformers and PEFT with DDP over gloo, as their users write it.

    torchrun --nproc-per-node 2 torch_side.py --checkpoint FILE [--data FILE] [--model FOLDER] [--batch N] [--nf4]
        [--device cuda]

Trains until it is killed; FILE is not used. Rank 0 prints a line per finished step: seconds since 1970, the step, and
its process. Each batch is padded to its longest text. With --nf4 bitsandbytes quantises the model, and the layers are
recomputed for the gradient, as `prepare_model_for_kbit_training` does by default. On a GPU the model is bf16, with
autocast for the adapter.
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
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device, dtype = (f"cuda:{rank}", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    nf4 = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    kind = {"quantization_config": nf4, "device_map": device} if arguments.nf4 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, **kind)
    model = prepare_model_for_kbit_training(model) if arguments.nf4 else model.to(device)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    rule = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    samples = texts.read(arguments.data, STEPS * arguments.batch * world)
    for step in range(STEPS):
        start = (step * world + rank) * arguments.batch
        texts_of_rank = {
            name: rows.to(device) for name, rows in batch(samples[start : start + arguments.batch]).items()
        }
        with torch.autocast(arguments.device, torch.bfloat16, enabled=on_gpu):
            loss = parallel(**texts_of_rank).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        rule.step()
        rule.zero_grad()
        if rank == 0:
            print(f"{time.time():.6f} step {step + 1} of process {os.getpid()}", flush=True)


if __name__ == "__main__":
    main()

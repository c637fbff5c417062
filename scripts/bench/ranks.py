"""Ranks of PyTorch over gloo, each in a separate process, as torchrun starts them."""

import tempfile

import torch


def run(part, arguments):
    """Runs `part` in each rank; returns the largest value of any rank for each name."""
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (part, arguments, folder, results), nprocs=arguments.ranks)
    measured = [results.get() for _ in range(arguments.ranks)]
    return {name: max(numbers[name] for numbers in measured) for name in measured[0]}


def rank_main(rank, part, arguments, folder, results):
    torch.set_num_threads(arguments.threads)
    # A file store: a port that is free now may be in use when rank 0 listens.
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=arguments.ranks)
    results.put(part(arguments))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

"""Ranks of PyTorch over gloo, each in a separate process, as torchrun starts them."""

import ctypes
import os
import tempfile

import torch


def run(part, arguments, hosts=1):
    """Runs `part` in each rank, on these hosts; returns the largest value of any rank for each name."""
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (part, arguments, hosts, folder, results), nprocs=arguments.ranks)
    measured = [results.get() for _ in range(arguments.ranks)]
    return {name: max(numbers[name] for numbers in measured) for name in measured[0]}


def enter_host(host):
    """Moves this process to a host of scripts/bench-step/hosts.sh, a network namespace."""
    os.environ["GLOO_SOCKET_IFNAME"] = f"e{host}"
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/n{host}") as namespace:
        if libc.setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace of host {host}")


def rank_main(rank, part, arguments, hosts, folder, results):
    if hosts > 1:
        enter_host(1 + rank * hosts // arguments.ranks)
    torch.set_num_threads(arguments.threads)
    # A file store: a port that is free now may be in use when rank 0 listens.
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=arguments.ranks)
    results.put(part(arguments))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

"""Train CLIP on the left and the right half of scikit-learn's images of digits, in several processes.

    torchrun --nproc-per-node 2 examples/clip.py    # 10 to 20 seconds; or without torchrun: one process

Each process encodes its part of the batch under autocast to bfloat16. ``group=`` contrasts it with the rows of all
processes, and gives the gradients of one process. The temperature is learned, as the logarithm of its reciprocal.

Requirements: pip install "./pairproof[examples]".
"""

import argparse
import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init_process_group: see docs/distributed.md, "The end of a process"
from torch.nn.parallel import DistributedDataParallel

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f'clip.py needs {error.name}: pip install "./pairproof[examples]" (the path of the clone)')

from pairproof import diagnose
from pairproof.fast import info_nce_loss


class Clip(torch.nn.Module):  # two towers and a learned scale of the logits
    def __init__(self):
        super().__init__()
        self.left = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 32))
        self.right = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 32))
        self.log_scale = torch.nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, halves):
        return self.left(halves[:, 0]), self.right(halves[:, 1]), torch.exp(-self.log_scale.clamp(max=4.6))


def train(steps, batch, accumulate):
    several = dist.is_initialized()
    rank, world, group = (dist.get_rank(), dist.get_world_size(), dist.group.WORLD) if several else (0, 1, None)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model and the same batches in every process
    images = torch.from_numpy(load_digits().images / 16).float()
    halves = images.unflatten(2, (2, 4)).movedim(2, 1).flatten(2)  # [N, 2, 32]
    model = Clip()
    trained = DistributedDataParallel(model) if several else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        for part in range(accumulate):
            own = torch.randint(len(halves), (batch,))[rank::world]
            last = part == accumulate - 1  # before that, gradients need not be averaged over the processes
            with trained.no_sync() if several and not last else contextlib.nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    a, b, temperature = trained(halves[own])
                    loss = info_nce_loss(a, b, temperature=temperature, group=group)
                (loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step in (0, steps - 1):  # at the start and at the end
            learned = float(temperature.detach())
            found = diagnose(a.detach().float(), embeddings_b=b.float(), loss="info_nce", temperature=learned)
            print(f"step {step + 1}: scale {1 / learned:.1f}, loss over all processes {loss.item():.4f}")
            print("  the rows of the first process:", *found.lines(), sep="\n  ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256, help="images per backward pass, over all processes")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(**vars(options))
    if "RANK" in os.environ:
        dist.destroy_process_group()

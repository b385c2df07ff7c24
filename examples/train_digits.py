"""Train a small encoder on scikit-learn's images of digits with a contrastive loss.

    python examples/train_digits.py                                  # SupCon; 10 to 20 seconds
    python examples/train_digits.py --loss nt_xent --plot digits.png # SimCLR, without labels
    python examples/train_digits.py --loss clip --compare            # two towers, then the same with another library
    torchrun --nproc-per-node 2 examples/train_digits.py             # SupCon in two processes

supcon and nt_xent contrast two augmented views of each image. clip contrasts the left and the right half of each
image, with one encoder per half. At the end, a k-nearest-neighbour classifier with 100 labelled training images
classifies the test images. The accuracy is printed for pixels and for embeddings.

Requirements: pip install "./pairproof[examples]", and with --compare "./pairproof[pml]".
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before init_process_group: see docs/distributed.md, "The end of a process"
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from sklearn.neighbors import KNeighborsClassifier
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f'train_digits.py needs {error.name}: pip install "./pairproof[examples]" (the path of the clone)')

from pairproof.fast import info_nce_loss, nt_xent_loss, repeat_labels, stacked_partners, supcon_loss

LOSSES = ("supcon", "nt_xent", "clip")
TEMPERATURE = 0.2
LABELLED = 100
"""Number of labelled training images for the classifier."""
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes the embeddings of both views, each ``[B, D]``, and the labels ``[B]``."""


def of_pairproof(name: str) -> LossFunction:
    """Return the loss of pairproof."""
    group = dist.group.WORLD if dist.is_initialized() else None

    def supcon(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
        return supcon_loss(torch.cat([a, b]), repeat_labels(labels, n_views=2), temperature=TEMPERATURE, group=group)

    def nt_xent(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        return nt_xent_loss(torch.cat([a, b]), stacked_partners(2 * len(a)), temperature=TEMPERATURE, group=group)

    def clip(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        return info_nce_loss(a, b, temperature=TEMPERATURE, group=group)

    return {"supcon": supcon, "nt_xent": nt_xent, "clip": clip}[name]


def of_pml(name: str) -> LossFunction:
    """Return the same loss from pytorch-metric-learning."""
    from pytorch_metric_learning import losses

    loss = losses.SupConLoss(TEMPERATURE) if name == "supcon" else losses.NTXentLoss(TEMPERATURE)

    def views(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
        classes = labels if name == "supcon" else torch.arange(len(a))
        return loss(torch.cat([a, b]), classes.repeat(2))

    def towers(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        # If both labels were the same object, the library would leave out the diagonal.
        items, others = torch.arange(len(a)), torch.arange(len(b))
        return (loss(a, items, ref_emb=b, ref_labels=others) + loss(b, items, ref_emb=a, ref_labels=others)) / 2

    return towers if name == "clip" else views


@dataclass
class Run:
    """The measurements of a run.

    Alignment and uniformity are defined in Wang and Isola 2020, arXiv 2005.10242. Each process measures its own rows.

    Attributes:
        loss: the loss of each step.
        alignment: the mean squared distance between the two views of an image, at each step.
        uniformity: log of the mean of exp(-2 d^2) at each step, where d is the distance between two rows of one view.
        pixels: share of test images that are classified correctly from their pixels.
        embeddings: share of test images that are classified correctly from the features before the encoder's head.
    """

    loss: list[float] = field(default_factory=list)
    alignment: list[float] = field(default_factory=list)
    uniformity: list[float] = field(default_factory=list)
    pixels: float = 0.0
    embeddings: float = 0.0


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images ``[B, 8, 8]``, shifted by up to one pixel, with random contrast and noise."""
    padded, size = F.pad(images, (1, 1, 1, 1)), images.shape[-1]
    moves = torch.randint(0, 3, (len(images), 2), generator=generator)
    rows, columns = (moves[:, k, None] + torch.arange(size) for k in (0, 1))
    moved = padded[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
    contrast = 0.8 + 0.4 * torch.rand(len(images), 1, 1, generator=generator, dtype=images.dtype)
    return moved * contrast + 0.1 * torch.randn(moved.shape, generator=generator, dtype=images.dtype)


class Tower(nn.Module):
    """A small convolutional network: images ``[B, 8, width]`` to features ``[B, 128]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.last = nn.Linear(16 * 4 * width // 2, 128)

    def forward(self, images: Tensor) -> Tensor:
        channels = F.relu(self.first(images[:, None]))
        return self.last(F.max_pool2d(F.relu(self.second(channels)), 2).flatten(1))


class Encoder(nn.Module):
    """One tower for both views, or one per half of the images. Each tower has a head that returns embeddings."""

    def __init__(self, towers: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Tower(8 // towers) for _ in range(towers))
        self.heads = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Linear(128, 32)) for _ in range(towers))

    def features(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the features for the classifier, ``[B, 256]``."""
        return torch.cat([F.normalize(self.towers[0](a), dim=1), F.normalize(self.towers[-1](b), dim=1)], dim=1)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads[0](self.towers[0](a)), self.heads[-1](self.towers[-1](b))


def accuracy(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """Return the share of test rows that a 5-nearest-neighbour classifier labels correctly."""
    classifier = KNeighborsClassifier(n_neighbors=5).fit(train.flatten(1).numpy(), train_labels.numpy())
    return float(classifier.score(test.flatten(1).numpy(), test_labels.numpy()))


def train(
    loss_name: str,
    loss_function: LossFunction,
    *,
    steps: int,
    batch: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    quiet: bool = False,
) -> Run:
    """Train an encoder and return the measurements.

    With several processes, each trains on its part of the batch. All return the same loss and accuracies.
    """
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    digits = load_digits()
    arrays = train_test_split(digits.images / 16, digits.target, test_size=0.3, random_state=0, stratify=digits.target)
    images, test_images = (torch.from_numpy(np.asarray(one)).to(dtype) for one in arrays[:2])
    labels, test_labels = (torch.from_numpy(np.asarray(one)) for one in arrays[2:])

    towers = 2 if loss_name == "clip" else 1
    torch.manual_seed(seed)
    encoder = Encoder(towers).to(dtype)
    trained = nn.parallel.DistributedDataParallel(encoder) if processes > 1 else encoder
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)  # the same in every process
    part = slice(rank * batch // processes, (rank + 1) * batch // processes)

    def views(batch_of_images: Tensor) -> tuple[Tensor, Tensor]:
        if loss_name == "clip":
            changed = augmented(batch_of_images, generator)
            return changed[..., :4], changed[..., 4:]
        return augmented(batch_of_images, generator), augmented(batch_of_images, generator)

    run = Run()
    progress = tqdm(range(steps), desc=loss_name, disable=quiet or rank > 0, unit="step")
    for _ in progress:
        chosen = torch.randint(0, len(images), (batch,), generator=generator)
        a, b = trained(*(view[part] for view in views(images[chosen])))
        loss = loss_function(a, b, labels[chosen][part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            one, other = F.normalize(a, dim=1), F.normalize(b, dim=1)
            run.loss.append(loss.item())
            run.alignment.append(float((one - other).square().sum(1).mean()))
            run.uniformity.append(float(torch.pdist(one).square().mul(-2).exp().mean().log()))
        progress.set_postfix(loss=f"{run.loss[-1]:.3f}")

    def embedded(rows: Tensor) -> Tensor:
        with torch.no_grad():
            return encoder.features(*((rows[..., :4], rows[..., 4:]) if loss_name == "clip" else (rows, rows)))

    known = slice(LABELLED)
    run.pixels = accuracy(images[known], labels[known], test_images, test_labels)
    run.embeddings = accuracy(embedded(images)[known], labels[known], embedded(test_images), test_labels)
    return run


def plot(run: Run, path: Path, title: str) -> None:
    """Plot loss, alignment and uniformity over the steps, and save the plots as an image."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for axis, name in zip(axes, ("loss", "alignment", "uniformity"), strict=True):
        axis.plot(getattr(run, name))
        axis.set(title=name, xlabel="step")
    figure.suptitle(title)
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=LOSSES, default="supcon")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256, help="images per step, over all processes")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save the curves as an image, such as digits.png")
    parser.add_argument(
        "--compare", action="store_true", help="repeat the run with pytorch-metric-learning, and print the differences"
    )
    options = parser.parse_args(arguments)
    if min(options.steps, options.batch) < 1:
        parser.error("--steps and --batch must be at least 1")
    torch.set_num_threads(1)  # the matrices are small
    distributed = "RANK" in os.environ
    if distributed:
        if options.compare:
            parser.error("--compare needs one process: start it without torchrun")
        dist.init_process_group("gloo")
    try:
        given = {"steps": options.steps, "batch": options.batch, "dtype": getattr(torch, options.dtype)}
        run = train(options.loss, of_pairproof(options.loss), seed=options.seed, **given)
        if not distributed or dist.get_rank() == 0:
            print(f"{options.loss}: loss {run.loss[0]:.4f} at the first step, {run.loss[-1]:.4f} at the last")
            print(f"alignment {run.alignment[-1]:.3f}, uniformity {run.uniformity[-1]:.3f}")
            print(f"k-NN accuracy: pixels {run.pixels:.1%}, embeddings {run.embeddings:.1%}")
            if options.plot:
                plot(run, options.plot, f"{options.loss}, {options.steps} steps")
                print(f"wrote {options.plot}")
        if options.compare:
            other = train(options.loss, of_pml(options.loss), seed=options.seed, **given)
            apart = np.abs(np.array(run.loss) - np.array(other.loss))
            print(
                f"pytorch-metric-learning: the losses differ by at most {apart[:20].max():.1e} in the first 20 steps "
                f"and {apart.max():.1e} in all steps; k-NN accuracy {other.embeddings:.1%}"
            )
    finally:
        if distributed:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

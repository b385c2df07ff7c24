"""Train SimCLR or SupCon on scikit-learn's images of digits with Lightning.

    python examples/simclr_lightning.py                  # SimCLR; 10 to 30 seconds
    python examples/simclr_lightning.py --loss supcon    # with labels

The diagnosis of the first and the last batch is printed. With several devices, pass
``group=torch.distributed.group.WORLD`` to the loss, so that it contrasts the rows of all processes.

Requirements: pip install "./pairproof[training]".
"""

import argparse
import sys

import torch
import torch.nn.functional as F

try:
    import lightning
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f'simclr_lightning.py needs {error.name}: pip install "./pairproof[training]" (the path of the clone)')

from pairproof import diagnose
from pairproof.fast import nt_xent_loss, repeat_labels, stacked_partners, supcon_loss

TEMPERATURE = 0.2


def two_views(batch):
    """Return two views ``[2B, 8, 8]`` of images ``[B, 8, 8]``, stacked: shifted by up to one pixel, with noise."""
    images = torch.stack([image for image, _ in batch])
    stacked = F.pad(images.repeat(2, 1, 1), (1, 1, 1, 1))
    places = torch.randint(3, (len(stacked), 2)).tolist()
    moved = torch.stack([image[r : r + 8, c : c + 8] for image, (r, c) in zip(stacked, places, strict=True)])
    return moved + 0.1 * torch.randn(moved.shape), torch.stack([label for _, label in batch])


class Contrastive(lightning.LightningModule):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss
        layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 32)
        self.encoder = torch.nn.Sequential(torch.nn.Flatten(), *layers)

    def training_step(self, batch, batch_idx):
        views, labels = batch
        rows = self.encoder(views)
        if self.loss == "supcon":
            value = supcon_loss(rows, repeat_labels(labels, n_views=2), temperature=TEMPERATURE)
        else:
            value = nt_xent_loss(rows, stacked_partners(len(rows)), temperature=TEMPERATURE)
        if self.global_step in (0, self.trainer.estimated_stepping_batches - 1):
            classes = {"labels": repeat_labels(labels, n_views=2)} if self.loss == "supcon" else {}
            found = diagnose(rows.detach(), loss=self.loss, temperature=TEMPERATURE, **classes)
            print(f"step {self.global_step + 1}:", *found.lines(), sep="\n  ")
        return value

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=("nt_xent", "supcon"), default="nt_xent")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    pairs = [*zip(torch.from_numpy(digits.images / 16).float(), torch.from_numpy(digits.target), strict=True)]
    loader = torch.utils.data.DataLoader(pairs, batch_size=128, shuffle=True, drop_last=True, collate_fn=two_views)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=options.epochs, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(Contrastive(options.loss), loader)


if __name__ == "__main__":
    main()

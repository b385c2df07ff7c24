"""Train an encoder with MoCo on scikit-learn's images of digits: a queue of earlier keys, from a momentum encoder.

    python examples/moco.py    # 10 to 20 seconds

A loss that rises at first is right: a new queue holds random rows, and the keys that replace them are more alike. The
diagnosis of the first and the last step says where the loss stands between log(1 + K) and its lowest value.

Requirements: pip install "./pairproof[examples]".
"""

import argparse
import copy
import sys

import torch
import torch.nn.functional as F

try:
    from sklearn.datasets import load_digits
    from sklearn.neighbors import KNeighborsClassifier
except ImportError as error:
    sys.exit(f'moco.py needs {error.name}: pip install "./pairproof[examples]" (the path of the clone)')

from pairproof import diagnose
from pairproof.fast import info_nce_loss

TEMPERATURE, MOMENTUM, BATCH, QUEUE = 0.2, 0.99, 128, 1024


def augmented(images):
    """Return images ``[B, 8, 8]``, each shifted by up to one pixel, with noise."""
    padded, places = F.pad(images, (1, 1, 1, 1)), torch.randint(3, (len(images), 2))
    moved = [image[r : r + 8, c : c + 8] for image, (r, c) in zip(padded, places, strict=True)]
    return torch.stack(moved) + 0.1 * torch.randn(images.shape)


def make_encoder():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 32))


def accuracy(encoder, images, classes):
    """Return the share of rows that their five nearest neighbours among the first 100 rows classify correctly."""
    rows = F.normalize(encoder(images), dim=1).detach().numpy()
    return KNeighborsClassifier(5).fit(rows[:100], classes[:100]).score(rows[100:], classes[100:])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16).float()
    encoder = make_encoder()
    key_encoder = copy.deepcopy(encoder).requires_grad_(False)
    queue = F.normalize(torch.randn(QUEUE, 32), dim=1)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    for step in range(options.steps):
        batch = images[torch.randint(len(images), (BATCH,))]
        queries = encoder(augmented(batch))
        with torch.no_grad():
            for slow, fast in zip(key_encoder.parameters(), encoder.parameters(), strict=True):
                slow.lerp_(fast, 1 - MOMENTUM)
            keys = F.normalize(key_encoder(augmented(batch)), dim=1)
        loss = info_nce_loss(queries, keys, negatives=queue, temperature=TEMPERATURE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, options.steps - 1):
            found = diagnose(queries, embeddings_b=keys, negatives=queue, loss="info_nce", temperature=TEMPERATURE)
            print(f"step {step + 1}:", *found.lines(), sep="\n  ")
        queue = torch.cat([queue[BATCH:], keys])  # the oldest keys leave
    print(f"k-NN accuracy: {accuracy(encoder, images, digits.target):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

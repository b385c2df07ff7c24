"""Train with logits in bfloat16, as autocast computes them, and with pairproof's losses, at temperature 0.02.

    python examples/exactness.py    # two losses, five seeds: one to two minutes; writes exactness.svg

With the same seed, all else is the same. Requirements: pip install "./pairproof[examples]".
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from moco import load_digits, make_encoder
from train_digits import accuracy, augmented

from pairproof import diagnose
from pairproof.fast import supcon_loss


def plain_loss(rows, labels, temperature):  # autocast computes only the cross-entropy in float32
    logits = (F.normalize(rows, dim=1) @ F.normalize(rows, dim=1).T / temperature).to(rows.dtype)
    positives = (labels[:, None] == labels).fill_diagonal_(False).to(rows.dtype)
    return F.cross_entropy(logits.fill_diagonal_(-1e9), positives / positives.sum(dim=1, keepdim=True))


def train(loss, function, seed, steps):  # returns k-NN accuracy in %, and 1 - cosine at every tenth step
    torch.manual_seed(seed)
    encoder, digits, gaps = make_encoder(), load_digits(), []
    images, classes = torch.from_numpy(digits.images / 16).float(), torch.from_numpy(digits.target)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    for step in range(steps):
        batch = torch.randint(1200, (256,))
        labels = (classes[batch] if loss == "supcon" else torch.arange(256)).repeat(2)  # NT-Xent: one class per image
        rows = encoder(augmented(images[batch].repeat(2, 1, 1), torch.default_generator))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = function(rows, labels, temperature=0.02)
        if step % 10 == 0:
            values = value, plain_loss(rows.double(), labels, temperature=0.02)
            a, b = (torch.autograd.grad(one, rows, retain_graph=True)[0].double().flatten() for one in values)
            gaps.append(1 - F.cosine_similarity(a, b, dim=0).item())
        if seed == 0 and function == supcon_loss and step in (0, steps - 1):
            print(f"{loss}, step {step + 1}:", *diagnose(rows, labels, temperature=0.02).lines(), sep="\n  ")
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    rows = F.normalize(encoder(images), dim=1).detach()
    return 100 * accuracy(rows[:1200], classes[:1200], rows[1200:], classes[1200:]), gaps


def main(arguments=None):
    import matplotlib.figure

    matplotlib.rcParams["svg.fonttype"] = "none"  # letters remain text
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    parser.add_argument("--steps", type=int, default=400, help="default: 400")
    args = parser.parse_args(arguments)
    if args.seeds < 2 or args.steps < 30:
        parser.error("--seeds must be at least 2, and --steps at least 30")
    torch.set_num_threads(1)  # the matrices are small
    figure, table = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained"), []
    for loss, (left, right) in zip(("nt_xent", "supcon"), figure.subplots(2, 2), strict=True):
        hits = {}
        for name, function, style in (("bfloat16", plain_loss, ":"), ("pairproof", supcon_loss, "-")):
            hits[name], gaps = zip(*[train(loss, function, k, args.steps) for k in range(args.seeds)], strict=True)
            thirds = "".join(f"{np.median(part):9.0e}" for part in np.array_split(np.array(gaps), 3, axis=1))
            table += [f"{loss:8} {name:10} {np.mean(hits[name]):6.2f} ± {np.std(hits[name], ddof=1):.2f} {thirds}"]
            left.semilogy(range(0, args.steps, 10), np.transpose(gaps), style, color="black", linewidth=0.8)
        more = [b - a for a, b in zip(*hits.values(), strict=True)]
        table += [f"{loss:8} difference {np.mean(more):+6.2f} ± {np.std(more, ddof=1):.2f} by seed {np.round(more, 2)}"]
        left.set(title=f"{loss}: gradient, 1 - cosine with float64", xlabel="step (dotted: bfloat16, solid: pairproof)")
        right.plot([*hits], [*hits.values()], "o-", color="black", markersize=4)
        right.set(title=f"{loss}: accuracy in %, one line per seed")
    print("loss     logits     accuracy (%)   median of 1 - cosine in each third of the steps", *table, sep="\n")
    figure.savefig("exactness.svg")


if __name__ == "__main__":
    main()

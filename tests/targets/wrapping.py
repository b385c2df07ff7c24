"""A wrapper that imports neither torch nor numpy."""

import losses
from plain import supcon as of_numpy


def supcon(embeddings, labels, temperature):
    return losses.supcon(embeddings, labels, temperature)


def supcon_of_numpy(embeddings, labels, temperature):
    return of_numpy(embeddings, labels, temperature=temperature)

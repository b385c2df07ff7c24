"""Time two-tower losses of other libraries beside our replacements: ``python -m bench.compat_towers``.

A step is forward and backward, on one thread. Samples of the two classes alternate. The ratio of a process is the
median over pairs of neighbouring samples; the table has the median over processes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof.compat import open_clip, sentence_transformers
from pairproof.conformance.implementations.open_clip import OpenClip
from pairproof.conformance.implementations.sentence_transformers import SentenceTransformers

from .alternate import alternated
from .measure import train

SIZES = (64, 256, 1024)

Given = list[Tensor]
"""Three towers ``[N, D]``, the logit scale and the logit bias."""
Loss = Callable[[Given], Tensor]
ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def of_clip(name: str) -> Callable[[Any, Any], Loss]:
    """Return a function that creates an open_clip loss, given the modules of open_clip and sentence-transformers."""

    def made(clip: Any, ranking: Any) -> Loss:
        module = getattr(clip, name)()
        if name == "SigLipLoss":
            return lambda given: module(given[0], given[1], given[3], given[4])
        return lambda given: module(given[0], given[1], given[3])

    return made


def of_ranking(count: int = 2, **options: Any) -> Callable[[Any, Any], Loss]:
    """Return a function that creates the ranking loss, given the modules of open_clip and sentence-transformers.

    Args:
        count: number of towers: 2, or 3 with hard negatives.
        **options: options of the loss.
    """

    def made(clip: Any, ranking: Any) -> Loss:
        given = {"similarity_fct": sentence_transformers.cos_sim, **options}
        module = ranking.MultipleNegativesRankingLoss(None, **given)
        return lambda towers: module.compute_loss_from_embeddings(towers[:count], None)

    return made


def of_gist(clip: Any, ranking: Any) -> Loss:
    """Return the loss of GISTEmbed. As embeddings of the guide, queries get the third tower, documents the first."""
    if ranking is sentence_transformers:
        module = sentence_transformers.GISTEmbedLoss(temperature=0.05)
        return lambda towers: module.compute_loss_from_embeddings(towers[:2], [towers[2], towers[0]])
    stub = SimpleNamespace(tokenizer=importlib.import_module(TESTS).Tokenizer(), max_seq_length=1)
    theirs = ranking.GISTEmbedLoss(stub, stub, temperature=0.05)

    def loss(towers: Given) -> Tensor:
        theirs.model = lambda features: {"sentence_embedding": towers[features["column"]]}
        theirs.guide = lambda features: {"sentence_embedding": [towers[2], towers[0]][features["column"]]}
        value: Tensor = theirs([{"column": 0}, {"column": 1}], None)
        return value

    return loss


def step(loss: Loss, *given: Tensor) -> Tensor:
    """Return the loss of the inputs."""
    return loss([*given])


def near(a: Tensor, b: Tensor) -> Tensor:
    """Return the negative Euclidean distances."""
    return -torch.cdist(a, b)


LOSSES: dict[str, Callable[[Any, Any], Loss]] = {
    "ClipLoss": of_clip("ClipLoss"),
    "SigLipLoss": of_clip("SigLipLoss"),
    "MultipleNegativesRankingLoss": of_ranking(),
    "the same, one hard negative": of_ranking(3),
    "the same, both directions": of_ranking(
        directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
    ),
    "the same, four directions": of_ranking(directions=ALL),
    "the same, hardness": of_ranking(hardness_mode="in_batch_negatives", hardness_strength=5.0),
    "the same, distances": of_ranking(similarity_fct=near, scale=1.0),
    "GISTEmbedLoss": of_gist,
}
TESTS = "tests.test_compat_sentence_transformers"


def measured(name: str, size: int, columns: int) -> dict[str, Any]:
    """Compare both classes on one batch; return the median times in milliseconds, and the ratio theirs / ours."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(size)
    towers = [F.normalize(torch.randn(size, columns, generator=generator)).requires_grad_() for _ in range(3)]
    inputs = (*towers, torch.tensor(20.0).requires_grad_(), torch.tensor(-10.0).requires_grad_())
    peers = {"ours": (open_clip, sentence_transformers)}
    if name.endswith("ipLoss"):
        peers["theirs"] = OpenClip({}, "cpu").module(), None  # type: ignore[assignment]
    else:
        folder = SentenceTransformers({}, "cpu").path.parents[3]
        peers["theirs"] = None, importlib.import_module(TESTS).loaded(folder)  # type: ignore[assignment]
    losses = {side: LOSSES[name](*libraries) for side, libraries in peers.items()}
    steps = {side: partial(step, loss) for side, loss in losses.items()}
    ours, theirs = (float(train(steps[side], inputs)) for side in ("ours", "theirs"))
    if not abs(ours - theirs) <= 1e-4 * abs(theirs):
        raise ValueError(f"{name}, {size}: the values differ: {ours}, {theirs}")
    found = alternated({side: partial(train, each, inputs) for side, each in steps.items()})
    return {**found, "by": evaluated_by(losses["ours"])}


def evaluated_by(loss: Loss) -> str:
    """Return the attribute ``evaluated_by`` of our loss, which is in the closure of ``loss``."""
    cells = [cell.cell_contents for cell in loss.__closure__ or ()]
    return next(str(cell.evaluated_by) for cell in cells if hasattr(cell, "evaluated_by"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line of Markdown for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="run one comparison, given as JSON [loss, rows, columns]; print JSON")
    parser.add_argument("--losses", nargs="*", default=[*LOSSES], choices=[*LOSSES])
    parser.add_argument("--sizes", nargs="*", type=int, default=[*SIZES])
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--processes", type=int, default=3)
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(measured(*json.loads(given.one))))  # noqa: T201
        return
    print("| loss | pairs | evaluated by | original, ms | ours, ms | times as fast |")  # noqa: T201
    print("|---|---|---|---|---|---|")  # noqa: T201
    for name in given.losses:
        for size in given.sizes:
            command = [sys.executable, "-m", "bench.compat_towers", "--one", json.dumps([name, size, given.columns])]
            rows = [
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                for _ in range(given.processes)
            ]
            theirs, ours, ratio = (statistics.median(row[key] for row in rows) for key in ("theirs", "ours", "ratio"))
            figures = f"{theirs:.2f} | {ours:.2f} | {ratio:.2f}"
            print(f"| {name} | {size} | {rows[0]['by']} | {figures} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

"""A loss as a command with JSON lines; the first argument selects right answers or one kind of wrong answer."""

from __future__ import annotations

import json
import os
import sys
import time


def answers(mode, request, count):
    """Return what a mode answers instead of the loss; None if it computes the loss."""
    identity, rows = request["id"], next(iter(request["matrices"].values()))
    zeros = [[0.0] * len(row) for row in rows]
    if mode == "hang-once" and count == 1:
        time.sleep(600)
    if mode == "hang":
        time.sleep(600)
    if mode == "crash":
        sys.stderr.write("warming up\nout of memory\n")
        sys.exit(7)
    if mode == "slow-end":
        os.close(1)
        time.sleep(0.2)
        os._exit(9)
    return {
        "no-json": "the loss is 1.25",
        "no-object": [1.25],
        "wrong-id": {"id": identity + 1, "value": 1.0},
        "true-id": {"id": True, "value": 1.0},
        "text": {"id": identity, "value": "NaN"},
        "bool": {"id": identity, "value": True},
        "nothing": {"id": identity},
        "too-many": {"id": identity, "values": [1.0, 2.0, 3.0, 4.0, 5.0]},
        "no-list": {"id": identity, "values": 1.0},
        "short-gradient": {"id": identity, "value": 1.0, "gradients": {"embeddings": zeros[1:]}},
        "narrow-gradient": {"id": identity, "value": 1.0, "gradients": {"embeddings": [row[1:] for row in zeros]}},
        "other-gradient": {"id": identity, "value": 1.0, "gradients": {"features": zeros}},
        "flat-gradient": {"id": identity, "value": 1.0, "gradients": zeros},
        "text-gradient": {
            "id": identity,
            "value": 1.0,
            "gradients": {"embeddings": [["nan"] * len(row) for row in rows]},
        },
        "error": {"id": identity, "error": "no such loss"},
        "null-error": {"id": identity, "error": None},
        "null": {"id": identity, "value": None},
        "infinite": {"id": identity, "value": float("inf")},
        "one": {"id": identity, "value": 1.0},
    }.get(mode)


def computed(mode, request):
    """The right answer, with gradients or without. It needs no torch, whose import takes most of a command's time."""
    import numpy as np

    from pairproof import reference

    name = {"supcon": "supcon_loss", "nt_xent": "nt_xent_loss", "info_nce": "info_nce_loss"}[request["loss"]]
    options = dict(request["options"])
    arguments = {key: np.array(value) for key, value in request["arguments"].items()}
    matrices = {key: np.array(value) for key, value in request["matrices"].items()}

    def evaluate(given):
        return getattr(reference, name)(**given, **arguments, **options).loss

    def derivative(key, place):
        stepped = {other: rows.astype(complex) for other, rows in matrices.items()}
        stepped[key][place] += 1e-30j
        return float(np.sum(evaluate(stepped)).imag / 1e-30)

    loss, reply = evaluate(matrices), {"id": request["id"]}
    if mode == "right":
        reply["gradients"] = {
            key: [[derivative(key, (i, j)) for j in range(rows.shape[1])] for i in range(len(rows))]
            for key, rows in matrices.items()
        }
    return reply | ({"values": [float(v) for v in loss]} if isinstance(loss, list) else {"value": loss})


def main():
    mode = sys.argv[1]
    if mode == "dead":
        sys.exit("no licence found")
    for count, line in enumerate(sys.stdin):
        request = json.loads(line)
        if mode == "babble":
            while True:
                sys.stdout.write("x" * 4096)
        answer = answers(mode, request, count)
        if answer is None:
            answer = computed(mode, request)
        sys.stdout.write((answer if isinstance(answer, str) else json.dumps(answer)) + "\n")
        sys.stdout.flush()


main()

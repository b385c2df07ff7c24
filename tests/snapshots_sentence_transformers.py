"""A pytest plugin with which the loss of GISTEmbed is imported without sentence-transformers, which needs transformers.

The file of the loss is that in the folder of peers. Everything else that it imports is replaced, so only tests that use
no model of transformers can run.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from pairproof.conformance.implementations import sentence_transformers as peer

_folder = peer.SentenceTransformers({}, "cpu").path.parents[3]
_top = f"{peer.TOP}.sentence_transformer"
_names = (*peer.PACKAGES, *peer.UNUSED, f"{peer.TOP}.util.batch_to_device")
for _name in (*_names, f"{_top}.modules", f"{_top}.modules.StaticEmbedding", "transformers"):
    _module = sys.modules[_name] = ModuleType(_name)
    _module.__path__ = [str(_folder.joinpath(*_name.split(".")))] if _name in peer.PACKAGES else []
    _parent, _, _last = _name.rpartition(".")
    if _parent in sys.modules:
        setattr(sys.modules[_parent], _last, _module)
vars(sys.modules["transformers"])["PreTrainedTokenizerBase"] = object


def embed_columns(model: Any, columns: list[Any]) -> list[Any]:
    return [model(features)["sentence_embedding"] for features in columns]


vars(sys.modules[f"{peer.TOP}.base.losses.merged_forward"])["embed_columns"] = embed_columns
_gist = importlib.import_module(f"{peer.LOSSES}.gist_embed")
vars(sys.modules[peer.LOSSES])["GISTEmbedLoss"] = _gist.GISTEmbedLoss

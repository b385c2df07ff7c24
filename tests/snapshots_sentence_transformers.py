"""A pytest plugin that makes the losses of sentence-transformers importable without the package, which needs
transformers: their modules are found in the folder of peers, and what else they import is replaced.

Only tests that use neither a model nor a tokenizer can run with it.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from pairproof.conformance.implementations import sentence_transformers as peer

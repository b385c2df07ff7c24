"""What the server imports and compiles from which `ranks` forks processes."""

import torch.distributed.nn  # noqa: F401

from pairproof.fast import warm_up

warm_up()

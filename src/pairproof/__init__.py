"""pairproof: a verification suite for contrastive losses.

The parts of this package are folders at the top of the repository: ``pairproof.reference`` in
``reference/``, ``pairproof.fast`` in ``fast/``, ``pairproof.conformance`` in ``conformance/`` and
``pairproof.fixtures`` in ``fixtures/``. ``pyproject.toml`` maps them; importing this module does not import them.
"""

__version__ = "0.1.0"

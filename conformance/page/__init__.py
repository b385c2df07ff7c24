"""The HTML page of ``pairproof report`` and ``pairproof check --html``."""

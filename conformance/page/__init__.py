"""The HTML pages of ``pairproof report`` and of ``--html``."""

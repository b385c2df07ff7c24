"""Benchmark `pairproof.fast`, plain torch and public implementations (peers): ``python -m bench``.

A *form* is a loss with one way of giving its positives. Each form is timed in its own process, with one thread. Timings
(samples) of two implementations alternate, and a ratio is the median over pairs of neighbouring samples. An
implementation is timed only if its float64 value is right.
"""

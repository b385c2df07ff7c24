"""Speed, memory and accuracy of `pairproof.fast` beside its peers, measured by one protocol: ``python -m bench``.

Every figure comes from a fresh process with one thread. Implementations alternate, and what is reported is the median
of the ratios of neighbouring samples, which repeats where two sequential timings would not. An implementation is timed
only after it gave the true value of the same batch in float64. On a GPU the clock is the device's own events, and peak
memory is the allocator's.
"""

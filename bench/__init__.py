"""Benchmark `pairproof.fast`, plain torch and the peers: time, memory and errors, with ``python -m bench``.

A form is a loss with one way of giving its positives. Every form is timed in its own process with one thread. Samples
of different implementations alternate, and the reported ratio is the median over pairs of neighbouring samples; this is
more reproducible than two separate timings.

An implementation is timed only if its float64 value is right. On a GPU, times are measured with CUDA events, and peak
memory is reported by the allocator.
"""

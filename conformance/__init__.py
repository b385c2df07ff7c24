"""The harness: cases, their certified truth, the implementations, the verdicts, the command line.

It needs the extra ``pairproof[verify]``; each module says at its top what it is for.
"""

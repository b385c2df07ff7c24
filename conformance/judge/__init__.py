"""Verdicts: every implementation, or anybody's loss, held against the suite."""

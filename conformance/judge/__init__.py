"""Verdicts on the implementations and on a user's loss."""

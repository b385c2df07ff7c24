"""Explanations of failures, and the identification of unknown losses."""

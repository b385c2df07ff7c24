"""What a loss computes instead: explanations of failures, and the identification of unknown losses."""

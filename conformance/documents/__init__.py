"""The published worked examples: their figures, their claims, and their own code."""

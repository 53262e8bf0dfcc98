"""From logits to tokens: adjustments, the draw by counter-based randomness, log-probabilities."""

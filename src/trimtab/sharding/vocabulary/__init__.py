"""Embedding and output head divided by vocabulary, and a cross-entropy that never gathers the logits."""

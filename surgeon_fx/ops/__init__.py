"""Sparse-saving operations: the native forward, with something smaller kept for the native backward."""

"""Data: reading, tokenizing, packing, and the order in which documents are seen."""

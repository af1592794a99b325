"""Data: reading, tokenising, packing, and the order in which documents are seen."""

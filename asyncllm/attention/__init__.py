"""The attention seam (``base``), its backends, and how one is chosen; nothing is imported until it is."""

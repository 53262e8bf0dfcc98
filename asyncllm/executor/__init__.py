"""The border between engine core and devices (``base``), and what stands behind it."""

"""The caller's end of the engine: how it is started, spoken to, and ended. No torch."""

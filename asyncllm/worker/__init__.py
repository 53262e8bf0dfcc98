"""The owner of one device: persistent batch, model runner, worker. Runs in the engine's process or in its own."""

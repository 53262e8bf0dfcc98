"""Grammars in the engine: compiled on a thread, followed token by token, told to the sampler as masks. No torch.

Loaded by the first request that has a grammar. The library is llguidance (the extra ``structured``); nothing outside
this room knows of it. What a caller may ask for is in :mod:`asyncllm.frontend.structured`.
"""

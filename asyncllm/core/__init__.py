"""The engine without its process: requests, the scheduler, the KV blocks, and the loop that joins them to an executor.

Nothing here loads torch or knows of devices; :mod:`asyncllm.executor.base` is the border to them.
"""

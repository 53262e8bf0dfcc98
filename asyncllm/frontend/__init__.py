"""Text to ids and ids to text, in the caller's process: no torch, no sockets.

In: :mod:`~asyncllm.frontend.input_processor` (with ``tokenizer`` and ``chat_template``). Out:
:mod:`~asyncllm.frontend.output_processor` (with ``detokenizer`` and ``logprobs``).
"""

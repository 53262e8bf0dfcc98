"""Kernels in Triton, as torch operators of the namespace ``asyncllm``. Nothing is imported until it is asked for.

``asyncllm`` works where triton is not installed: only a backend that was chosen imports these modules. With the
variable ``TRITON_INTERPRET=1``, set before the import, the same kernels run on CPU tensors, slowly, for tests.
"""

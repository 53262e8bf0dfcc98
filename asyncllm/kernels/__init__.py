"""Compiled operators for the CPU, each with a torch fallback of the same signature.

* :mod:`asyncllm.kernels.base`: the interface :class:`Kernels`, and the plain data it takes.
* :mod:`asyncllm.kernels.native`: the C++ library of ``csrc/``, called through ctypes without the GIL.
* :mod:`asyncllm.kernels.reference`: the same in torch: the oracle of the tests, and the fallback.
* :mod:`asyncllm.kernels.decoder`: a whole decoder as data, run by one call per step.
* :mod:`asyncllm.kernels.selector`: chooses between the two and says which.
* :mod:`asyncllm.kernels.library`: finds, loads and describes the library; :mod:`asyncllm.kernels.build` compiles it.

Invariant: a row of any result depends on that row's inputs alone, bit for bit, in the native library: never on its
neighbours, on chunking, on threads or on the vector width. The torch fallback promises equality within rounding only.
"""

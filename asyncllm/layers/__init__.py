"""The building blocks of a decoder over one flat batch of tokens, ``[T, …]``; there is no batch dimension anywhere.

Every block computes what the block of the same name in transformers computes, in the same order of operations. Weights
are allocated uninitialised in their final dtype and place, and say under which checkpoint names they are to be filled
(``destinations``), so that loading copies each tensor once.
"""

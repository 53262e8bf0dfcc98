"""What crosses a process border: msgspec structs and their codec, nothing else.

Compatibility rule: structs are positional arrays; fields are only ever appended, with a default, and tags never change.
"""

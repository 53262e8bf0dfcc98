"""The output of a chat model cut into channels while it streams: reasoning, tool calls, content, and the markers.

Text in, spans of text out; no ids, no engine. Invariant, for every parser: the texts of its spans joined are the text
that went in, and what it finds does not depend on how that text was cut into pieces.
"""

"""The protocol as a model: searched exhaustively, and held against the real scripts.

`model` is the one source of truth: what each script answers and leaves behind. `search` drives it
through every reachable state of the worlds in `worlds`; `conformance` holds the real scripts on
real servers against it. `model_mutants` and `lua_mutants` break the one and the other on purpose.
"""

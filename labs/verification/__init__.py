"""The protocol as a model, which is searched exhaustively and compared with the real scripts.

`model` defines what each script replies and stores. `search` visits every reachable state of the
`scenarios`; without one of the `guards`, it finds a counterexample. `replay` and `live` compare the
scripts on real servers with the model, and `lua_mutants` changes the scripts to show that mistakes
are detected.
"""

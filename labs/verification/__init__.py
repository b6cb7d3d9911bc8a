"""The protocol as a model, which is searched exhaustively and compared with the real scripts.

`model` defines what each script replies and stores. `search` visits every reachable state of the
environments in `environments`; `conformance` compares the scripts on real servers with the model.
`model_mutants` and `lua_mutants` change the model and the scripts to show that mistakes are
detected.
"""

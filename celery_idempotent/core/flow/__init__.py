"""The flow of a call: begin, then run, replay or refuse, then settle.

:func:`.flow.execute` is the flow, written once as a coroutine. A runtime runs it in a thread
(:mod:`.thread`) or on an event loop (`functions.aio`).
"""

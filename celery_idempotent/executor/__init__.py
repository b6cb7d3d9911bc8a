"""The flow of a call: begin, then run, replay or refuse, then settle.

:func:`.executor.execute` is the flow, written once as a coroutine. A runtime drives it: in a thread
(:mod:`.runtime.blocking`) or on an event loop (:mod:`.runtime.asyncio`).
"""

"""Histories of calls of the scripts, made under faults, and decided by the model.

``make history`` records each call of many processes with the times at which it was invoked and at
which its reply arrived, while faults are injected into the store. The checker then looks, key by
key, for an order of the calls that the times allow and that explains every reply to the byte. The
scripts are linearizable with the model of ``make proof`` as their specification, or the run fails.
"""

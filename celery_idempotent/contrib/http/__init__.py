"""The common part of the middleware and of the decorators of single endpoints: all but their I/O.

The modules beside this package add that of their interface or framework.
"""

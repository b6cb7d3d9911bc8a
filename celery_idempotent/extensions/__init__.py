"""Options that extend the flow of a call: a module for each, imported if a task sets the option.

`core.flow.extension` has their base classes, and the points at which the flow calls them.
"""

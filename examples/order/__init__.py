"""An order in steps, none of which is repeated."""

"""An order that is shipped in steps, none of which is repeated."""

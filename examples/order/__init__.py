"""An order that is shipped in steps; finished steps are not repeated."""

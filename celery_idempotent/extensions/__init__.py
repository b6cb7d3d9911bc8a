"""Options that extend the flow of a call. The flow itself names none of them."""

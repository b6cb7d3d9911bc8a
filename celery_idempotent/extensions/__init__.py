"""What options add to the flow of a call. The flow itself names none of them."""

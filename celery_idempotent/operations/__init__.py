"""What operators use: records, calls, workers, the command line and doctor."""

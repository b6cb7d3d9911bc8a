"""What tests, demos and benchmarks stand on: real servers, no fakes."""

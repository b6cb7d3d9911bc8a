"""Makes settings, key rules and executors of the options that an app and its tasks have."""

"""What a message of an idempotent task carries: headers, options of the call, its key."""

"""A pair from names or folders; text in, text out, in batches of one shape."""

"""The HTTP server: requests become engine requests, updates become responses."""

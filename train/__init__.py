"""Training of the heads that the engine serves."""

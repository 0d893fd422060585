"""The inference engine, its drafters and its command line."""

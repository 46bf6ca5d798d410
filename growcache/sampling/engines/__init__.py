"""Where samplers run."""

"""Where samplers run: processes of this machine (others may join)."""

"""What reads bytes that others wrote, given any bytes; see docs/reference/reliability.md."""

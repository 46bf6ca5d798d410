"""What reads bytes that others wrote, given any bytes; see docs/reliability.md."""

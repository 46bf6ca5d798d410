"""What reads bytes that others wrote, given any bytes; see docs/concepts/guarantees.md."""

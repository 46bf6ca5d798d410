"""What a reviewer of the statistics would ask."""

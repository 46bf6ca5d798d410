"""What a service shows: metrics, the page, plans and reports. It only reads."""

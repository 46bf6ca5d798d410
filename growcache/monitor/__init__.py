"""Views of a service: metrics, the page, plans and reports. They only read."""

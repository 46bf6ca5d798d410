"""Running it and showing it: command line, live view, demo."""

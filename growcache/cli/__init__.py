"""The command line: its commands, what they print, and the demo."""

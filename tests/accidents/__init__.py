"""Accidents of real life, each exercised only through the commands and the public API."""

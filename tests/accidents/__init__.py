"""Accidents of real life, each through the commands and front doors only."""

"""Stores, the catalog and object formats."""

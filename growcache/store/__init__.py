"""List and read the objects of a remote store."""

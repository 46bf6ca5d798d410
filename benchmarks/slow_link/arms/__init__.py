"""One module per loader: it runs in that loader's environment and imports nothing of others."""

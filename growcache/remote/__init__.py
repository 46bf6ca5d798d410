"""From a remote store to samples: listing, reading, decoding."""

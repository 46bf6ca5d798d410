"""Cache formats: samples to shard files and back, one file per format."""

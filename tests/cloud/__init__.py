"""The tests of stores against a bucket of the user's own: ``make test-cloud``."""

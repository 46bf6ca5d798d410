"""The tests of growcache, laid out as the package is."""

"""Programs for maintainers: releases, and lists that are made from the code."""

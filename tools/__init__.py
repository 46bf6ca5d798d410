"""What maintainers run: releases, and lists that are made from the code."""

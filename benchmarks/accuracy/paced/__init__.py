"""A training loop with a fixed pace behind a slow link, with a loader in the environment that it needs.

`loop` is the program; every other module is a loader, as a user of it would write it: `batches(place)`
yields batches without end, and `write(samples, folder)` converts the samples where the loader needs it.
"""

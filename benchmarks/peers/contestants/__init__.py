"""One module per contestant; each has ``write(case, folder)`` and ``opened(case, folder, …)``.

``write`` makes the samples of a case in the contestant's own format. ``opened`` is a context
manager that gives something to iterate: every iteration is an epoch, shuffled, in batches of
`BATCH` samples: ``(x, y)``, or ``(values, offsets, y)`` where samples differ in size, as arrays
or tensors of their own memory. It takes the setting's entries as keyword arguments.
"""

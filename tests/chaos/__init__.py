"""Chaos: the real service and real readers run while every kind of fault is injected.

``python -m tests.chaos --seed 1 --minutes 5``, or ``make chaos``.

    schedule   the faults and their times: a function of the seed
    content    the content of every sample, which any reader can check
    remote     the S3 server, the bad link to it, and objects that change
    disk       a file system for the cache, and a process that watches it
    service    the supervisor: started, killed, stopped
    reading    the program of a reader;  readers: its process, as the harness sees it
    states     the states that files are in at the moment of a kill
    flips      flipped bits, and how each was found
    purges     commands that purge random objects, and exports and peeks afterwards
    indexes    the content of an index, before and after a bit of it is flipped
    ledger     everything ever seen in the cache
    checks     the invariants, as functions of observations
    run        the rounds
    tally      counts of all events
"""

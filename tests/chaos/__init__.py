"""Chaos: the real service and real readers, while everything that can fail does so.

``python -m tests.chaos --seed 1 --minutes 5``, or ``make chaos``.

    schedule   what goes wrong, and when: a function of the seed
    content    what every sample holds, so that whoever gets one can check it
    remote     the S3 server, the bad link before it, objects that change
    disk       a file system of the cache's own, and the process that watches it
    service    the supervisor: started, killed, stopped
    reading    a reader, as a program;  readers: as the harness sees it
    states     in which state files were when somebody was killed
    flips      bits turned over, and who noticed
    indexes    what an index says, before and after a bit of it turned over
    ledger     what was ever seen in the cache
    checks     what must hold, as functions of what was seen
    run        the rounds
    tally      everything that happened, counted
"""

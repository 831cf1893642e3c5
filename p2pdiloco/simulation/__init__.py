"""The production protocol code in virtual time.

    world.py     runs machines on a heap of events and carries out every action of the protocol
    machine.py   what stands in for a host: its disk, its replica of the weights, its learner
    network.py   delay, loss, duplicates, partitions
    faults.py    what goes wrong, by name, drawn from the seed
    checkers.py  the promises, looked at after every event

One seed gives one history, on any machine. `python -m p2pdiloco.simulation SEED` tells it.
"""

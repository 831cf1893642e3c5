"""The production protocol code in virtual time.

    world.py     runs machines on a heap of events and carries out every action of the protocol
    errands.py   what nodes ask of each other, carried over the network
    machine.py   what stands in for a host: its clock, its replica of the weights
    learner.py   inner steps for ever
    disk.py      survives a crash; full, slow
    network.py   links of finite width, loss, cuts in one direction, home routers and their relay
    faults.py    what goes wrong, by name; lies.py what liars do; schedule.py draws from the seed
    promises.py  what must hold, as pure functions over what is seen of nodes
    checkers.py  looks at the promises after every event; bounds.py at what is kept
    trial.py     one trial

One seed gives one history, on any machine. `python -m p2pdiloco.simulation SEED` tells it.
"""

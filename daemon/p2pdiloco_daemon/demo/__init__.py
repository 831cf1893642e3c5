"""Several real nodes on one machine, supervised: what `p2pdiloco demo` runs.

`processes` starts and stops them, `polling` reads what they say about themselves, `table` shows it,
`evaluation` (a child process) reads what they left on disk, `verdict` says whether all is well.
"""

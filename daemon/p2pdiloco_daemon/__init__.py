"""The daemon: input, output and clocks around the library."""

"""Pure state machines: events in, actions out, time as an argument."""

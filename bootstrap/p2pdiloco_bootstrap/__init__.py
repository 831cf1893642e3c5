"""How a node gets onto the network: identity, host, invite, discovery, the first peer."""

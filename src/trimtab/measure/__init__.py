"""Everything that is timed: devices, operators, links, the codec and running steps."""

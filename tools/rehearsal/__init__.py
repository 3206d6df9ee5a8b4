"""A release as it will go, on this machine: `hatch run rehearse`."""

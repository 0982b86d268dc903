"""How frames move between workers: one contract (base.py), and the transports that registry.py lists."""

"""How frames move between workers: one contract (base.py), one module per transport."""

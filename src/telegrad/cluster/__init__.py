"""Workers on this machine, started and ended by the program that uses them."""

"""The bottom of the layers: the current worker, critical sections, waiting, events, text."""

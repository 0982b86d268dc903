"""What one thread needs: the current worker, critical sections, waiting, futures, the clock, text."""

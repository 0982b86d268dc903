"""`python -m benchmarks`."""

if __name__ == "__main__":
    # Imported here, not above: every spawned process imports this file again, and the start-up figure of a
    # backend that spawns its workers must not pay for rich and matplotlib.
    import sys

    from benchmarks.command_line import main

    sys.exit(main())

"""Imported by the process that forks the workers of the tests: what they do while they read is checked, too."""

import lease_check

lease_check.install()

"""How workers find each other: a group of workers in one of torch's stores."""

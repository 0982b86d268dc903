"""Values that stay where they were made, and who holds a handle to them."""

"""Values that stay where they were made, and the workers that hold a handle to them."""
